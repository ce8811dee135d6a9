"""`demo order`: shows the effect of the order in which gradients are added."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from app.config import DemoConfig, TrainConfig
from app.demos import demo_setup, presentation
from app.devices.device_setup import Devices
from app.runtime import run_context
from app.runtime.processes import call_in_child_process
from app.runtime.progress_bar import StepProgress
from app.verification.difference import Difference

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from app.data.dataset import ImageDataset
    from strategies.collectives import PerReplicaTensors

_STEPS = 20


def run(config: DemoConfig) -> None:
    """Adds real gradients in several orders, and trains with each order.

    Runs in a separate process, because deleting an iterator of MirroredStrategy can take 30 s.
    """
    call_in_child_process(show, config)


def show(send: Callable, config: DemoConfig) -> None:
    """Runs the experiment in this process."""
    prepared = demo_setup.set_up(config)
    from app.training.training_spec import load_data

    presentation.begin(
        "Every sum is rounded, so (a + b) + c can differ from a + (b + c), and an"
        " all-reduce that adds in another order gives other last digits. This shows it for"
        f" the gradients of LeNet's first step and for the weights after {_STEPS} steps.",
        prepared,
    )
    training = demo_setup.training(config, recipe="fast", epochs=1)
    dataset = load_data(training)
    gradients = first_gradients(training, prepared, dataset)
    _show_one_number(gradients, prepared.names)
    rows = compare_orders(training, prepared, dataset, gradients)
    presentation.show(
        f"LeNet on {dataset.name}: how far from manual with reduce_to_one, which adds device 0, 1,"
        " 2, … in turn",
        ["all-reduce", "sums that differ", "by at most", f"weights, {_STEPS} steps", "by at most"],
        rows,
    )
    presentation.end(
        "All of these sums are correct within rounding, and within one training all"
        " devices receive the same sum, so the replicas stay equal. But two trainings that"
        " add in different orders diverge slowly, because training amplifies small"
        " differences.",
        "manual and mirrored are bitwise identical only if both add in the same order. So"
        " a difference in the last digits is no proof of an error: verify computes how"
        " large rounding can be before it reports a mismatch.",
        then=[
            "verify --strategies=manual,mirrored --num_devices=4 --device=cpu --steps=5",
            "demo allreduce",
        ],
    )


def first_gradients(
    training: TrainConfig, prepared: Devices, dataset: "ImageDataset"
) -> list[list[np.ndarray]]:
    """Returns each device's gradients of the first step, before the all-reduce."""
    _, strategy, iterator = demo_setup.create(training, prepared, dataset)
    with demo_setup.recorded(strategy, iterator, num_steps=1) as (trace, _):
        names = trace.tensors(1, "gradients")
        return [
            [trace.read(1, "gradients", replica_id, name) for name in names]
            for replica_id in range(trace.num_shards)
        ]


def find_order_dependent_element(gradients: list[list[np.ndarray]]) -> list[np.float32] | None:
    """Returns the three values of the element whose two sums differ most; None if all are equal."""
    best, most = None, 0.0
    for a, b, c in zip(*gradients[:3], strict=True):
        apart = np.abs(((a + b) + c) - (a + (b + c)))
        if apart.max() > most:
            where, most = np.unravel_index(np.argmax(apart), apart.shape), apart.max()
            best = [array[where] for array in (a, b, c)]
    return best


def _show_one_number(gradients: list[list[np.ndarray]], names: list[str]) -> None:
    found = find_order_dependent_element(gradients)
    if found is None:
        presentation.say("For the first three devices, both sums of every element are equal here.")
        return
    a, b, c = found
    rows = [
        [name, letter, f"{value:.10g}"]
        for name, letter, value in zip(names[:3], "abc", found, strict=True)
    ]
    rows += [["", "(a + b) + c", f"{(a + b) + c:.10g}"]]
    rows += [["", "a + (b + c)", f"{a + (b + c):.10g}"]]
    presentation.show("one number of the gradient", ["on", "", "value"], rows)


def compare_orders(
    training: TrainConfig,
    prepared: Devices,
    dataset: "ImageDataset",
    gradients: list[list[np.ndarray]],
) -> list[list]:
    """Sums the gradients, and trains, with each all-reduce; returns a table row for each.

    The others are compared with the first.
    """
    import tensorflow as tf

    per_replica = []
    for name, arrays in zip(prepared.names, gradients, strict=True):
        with tf.device(name):
            per_replica.append([tf.constant(array) for array in arrays])
    others = [("manual", "direct"), ("manual", "tree"), ("manual", "ring")]
    on_gpus = "GPU" in prepared.names[0]
    others += [("mirrored", "reduce_to_one"), ("mirrored", "nccl" if on_gpus else "ring")]
    rows, first = [], None
    with StepProgress(_STEPS) as progress:
        for strategy_name, algorithm in [("manual", "reduce_to_one"), *others]:
            progress.start(f"training {_STEPS} steps: {strategy_name}, {algorithm}")
            config = dataclasses.replace(training, strategy=strategy_name, all_reduce=algorithm)
            sums, weights = _sums_and_weights(config, prepared, dataset, per_replica)
            first = first or (sums, weights)
            row = [f"{strategy_name} {algorithm}"]
            for own, reference in zip((sums, weights), first, strict=True):
                difference = Difference.between(own, reference)
                row += [f"{np.sum(own != reference):,} of {own.size:,}", _size(difference)]
            rows.append(row)
    return rows


def _sums_and_weights(
    config: TrainConfig,
    prepared: Devices,
    dataset: "ImageDataset",
    per_replica: "PerReplicaTensors",
) -> tuple:
    """Returns the sums of given gradients, and the weights after some steps, each as one vector."""
    _, strategy, iterator = demo_setup.create(config, prepared, dataset)
    # Objects of MirroredStrategy are kept until the process exits.
    run_context.required().keep(strategy, iterator)
    sums = [total.numpy() for total in strategy.all_reduce(per_replica)[0]]
    demo_setup.make_steps(strategy, iterator, _STEPS)
    return tuple(
        np.concatenate([array.ravel() for array in arrays])
        for arrays in (sums, demo_setup.state(strategy).values())
    )


def _size(difference: Difference) -> str:
    if not difference.absolute:
        return "bit-identical"
    return f"{difference.absolute:.2g} ({difference.ulps} ULP)"
