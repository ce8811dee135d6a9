"""`demo tensor`: shows the split channels, and the sum that the backward pass needs."""

from typing import TYPE_CHECKING

import numpy as np

from app.config import DemoConfig, TrainConfig
from app.demos import demo_setup, presentation, split_training
from app.devices.device_setup import Devices

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from app.data.dataset import ImageDataset
    from strategies.tensor import TensorStrategy


def run(config: DemoConfig) -> None:
    """Splits the channels of LeNet over the devices and compares the training with one device."""
    prepared = demo_setup.set_up(config)
    from app.training.training_spec import load_data

    training = demo_setup.training(config)
    dataset = load_data(training)
    presentation.begin(
        "Each device computes some of the channels of every layer of LeNet, for all"
        " images. If a layer needs all channels of its input, the devices send their"
        " channels to each other.",
        prepared,
    )
    tensor, train_tensor = split_training.build(training, prepared, dataset, "tensor")
    _show_parts(tensor)
    split_training.show_traffic(tensor, training.global_batch_size)
    _show_forgotten_sum(training, prepared, dataset)
    single, train_single = split_training.build(
        training, demo_setup.first(prepared, 1), dataset, "single"
    )
    losses = train_tensor(), train_single()
    apart = split_training.difference(tensor, single)
    presentation.end(
        f"{split_training.NUM_STEPS} steps: mean loss {losses[0]:.6f} here, {losses[1]:.6f}"
        f" on one device; weights differ by at most {apart.absolute:.1e}: rounding, because"
        " the gradient of a gathered channel is added over the devices. The channels that a"
        " device computes are bitwise identical to those of the whole layer.",
        then=[
            "verify --strategies=tensor,single --num_devices=2 --steps=3",
            "demo tensor --device=cpu --num_devices=4",
            "demo sharded",
        ],
    )


def _show_parts(strategy: "TensorStrategy") -> None:
    """Prints the number of channels of each layer with weights per device."""
    rows = []
    for split in strategy.rows[0].calls:
        if split.call.layer.variables:
            kept = [sum(v.numpy().size for v in layer.variables) for layer in split.layers]
            sizes = "/".join(map(str, split.sizes or []))
            rows.append([split.call.layer.name, sizes, "/".join(f"{k:,}" for k in kept)])
    presentation.show("parts", ["layer", "channels", "weights on each device"], rows)


def _show_forgotten_sum(training: TrainConfig, prepared: Devices, dataset: "ImageDataset") -> None:
    """Prints the first loss and gradients with and without the sum in the backward pass."""
    from strategies.observer import Observer

    class Forgetful(Observer):
        """Keeps only the device's own term of the sum."""

        def on_pieces(self, device_id: int, pieces: list) -> list:
            return [pieces[device_id % len(pieces)]]

    losses, updates = [], []
    for observer in (Observer(), Forgetful()):
        strategy, _ = split_training.build(training, prepared, dataset, "tensor")
        strategy.observer = observer
        before = demo_setup.state(strategy)
        batches = dataset.train_images[:64], dataset.train_labels[:64].astype(np.int32)
        losses.append(_one_step(strategy, batches))
        after = demo_setup.state(strategy)
        updates.append({name: after[name] - before[name] for name in before})
    rows = [["loss of the step", f"{losses[0]:.6f}", f"{losses[1]:.6f}", ""]]
    for name, right in updates[0].items():
        wrong = updates[1][name]
        apart = np.linalg.norm(wrong - right) / np.linalg.norm(right)
        rows.append(
            [
                name.removeprefix("model/"),
                f"{np.linalg.norm(right):.3e}",
                f"{np.linalg.norm(wrong):.3e}",
                f"{apart:.0%}",
            ]
        )
    presentation.show(
        "the same step without the sum in the backward pass of a gather: length of each update",
        ["", "with the sum", "without", "wrong by"],
        rows,
    )


def _one_step(strategy: "TensorStrategy", batch: tuple[np.ndarray, np.ndarray]) -> float:
    """Trains on one batch and returns its loss."""
    import tensorflow as tf

    iterator = strategy.distribute(tf.data.Dataset.from_tensors(batch).repeat())
    return strategy.train_steps(iterator, 1).loss
