"""`demo sharded`: splits weights and optimizer state, bitwise identical to `manual`."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from app.config import DemoConfig
from app.demos import demo_setup, presentation, split_training

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from strategies.sharded import ShardedStrategy


def run(config: DemoConfig) -> None:
    """Trains LeNet with sharded state and with full copies."""
    prepared = demo_setup.set_up(config)
    from app.training.training_spec import load_data

    training = demo_setup.training(config, recipe="fast")
    dataset = load_data(training)
    num = len(prepared.names)
    presentation.begin(
        "As in data parallelism, each device trains on its own part of the batch. But it"
        f" stores only one part in {num} of the weights and of the optimizer state, gathers"
        " the weights before each step and drops them after it.",
        prepared,
    )
    sharded, train_sharded = split_training.build(training, prepared, dataset, "sharded")
    manual, train_manual = split_training.build(training, prepared, dataset, "manual")
    _show_state(sharded, _size_bytes(manual.state().values()))
    split_training.show_traffic(sharded, training.global_batch_size)
    split_training.show_traffic(manual, training.global_batch_size)
    losses = train_sharded(), train_manual()
    apart = split_training.difference(sharded, manual)
    verdict = "are bitwise identical" if apart.identical else f"differ by {apart.absolute:.3g}"
    presentation.end(
        f"{split_training.NUM_STEPS} steps with momentum: mean loss {losses[0]:.6f} here,"
        f" {losses[1]:.6f} in `manual`; weights and optimizer state {verdict}. A"
        " reduce-scatter and an all-gather are the two halves of an all-reduce: between"
        " them each device updates its own part.",
        then=[
            f"verify --strategies=sharded,manual --num_devices={num} --recipe=fast --steps=3",
            "train --strategy=sharded --shard=optimizer --num_devices=2    (ZeRO-1)",
            "demo pipeline",
        ],
    )


def _show_state(strategy: "ShardedStrategy", whole_bytes: int) -> None:
    """Prints the size of weights and optimizer state on each device."""
    rows = []
    for device, part in zip(strategy.devices, strategy.parts, strict=True):
        weights = _size_bytes(v.numpy() for v in part.weights)
        state = _size_bytes(v.numpy() for v in part.optimizer.variables)
        rows.append(
            [device, f"{weights:,}", f"{state:,}", f"{(weights + state) / whole_bytes:.3f}"]
        )
    presentation.show(
        f"bytes that each device keeps, of {whole_bytes:,} in a whole copy",
        ["on", "weights", "optimizer state", "of a copy"],
        rows,
    )


def _size_bytes(arrays: Iterable[np.ndarray]) -> int:
    """Returns the bytes of arrays, without scalars such as the step."""
    return sum(array.nbytes for array in arrays if array.ndim)
