"""`demo many_devices`: runs the same training on up to 16 devices."""

from typing import TYPE_CHECKING

import numpy as np

from app.config import DemoConfig, TrainConfig
from app.demos import demo_setup, presentation
from app.devices.device_setup import Devices
from app.performance import interval
from app.performance.all_reduce_model import all_reduce_cost
from app.performance.case import Case, Sample
from app.performance.rounds import measure
from app.runtime import console
from app.runtime.progress_bar import StepProgress
from app.verification.difference import WeightDifference

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from app.data.dataset import ImageDataset

_STEPS = 5, 20  # Numbers of steps after which weights are compared.
_ROUNDS = 5
_ALGORITHMS = ("reduce_to_one", "ring", "tree", "direct")


def run(config: DemoConfig) -> None:
    """Trains on 1, 2, 4, … devices, compares the weights and times a step."""
    prepared = demo_setup.set_up(config)
    from app.training.training_spec import load_data

    counts = counts_up_to(len(prepared.names))
    training = demo_setup.training(config, recipe="fast", epochs=1)
    dataset = load_data(training)
    presentation.begin(
        f"The batch stays {training.global_batch_size}; more and more devices share it. The"
        " arithmetic does not change, so the training should not either.",
        prepared,
    )
    weights = train_on_each(training, prepared, dataset, counts)
    _show_weights(counts, training.global_batch_size, weights)
    _show_all_reduce(counts, sum(array.nbytes for array in weights[0][0].values()))
    _show_times(config, counts, prepared.simulated)


def counts_up_to(num_devices: int) -> list[int]:
    """Returns 1, 2, 4, … and `num_devices` itself."""
    powers = [2**i for i in range(num_devices.bit_length())]
    return sorted({*powers, num_devices} - {0})


def train_on_each(
    training: TrainConfig, prepared: Devices, dataset: "ImageDataset", counts: list[int]
) -> list[list[dict[str, np.ndarray]]]:
    """Runs the same steps on the first 1, 2, 4, … devices.

    Returns:
        For each number of devices the weights after each of `_STEPS`.

    Raises:
        ReplicaDivergenceError: the replicas of a training differ.
    """
    from app.training.replica_divergence import check_replica_divergence

    weights = []
    with StepProgress(_STEPS[-1]) as progress:
        for count in counts:
            progress.start(f"{_STEPS[-1]} steps on {console.count(count, 'device')}")
            devices = demo_setup.first(prepared, count)
            _, strategy, iterator = demo_setup.create(training, devices, dataset)
            done, states = 0, []
            for num_steps in _STEPS:
                demo_setup.make_steps(strategy, iterator, num_steps - done)
                check_replica_divergence(strategy)
                states.append(demo_setup.state(strategy))
                done = num_steps
                progress.message(("step", done))
            weights.append(states)
    return weights


def _show_weights(counts: list[int], size: int, weights: list[list[dict]]) -> None:
    rows = []
    for count, own in zip(counts, weights, strict=True):
        smallest, largest = size // count, -(-size // count)
        shard = str(largest) if smallest == largest else f"{smallest} or {largest}"
        # `check_replica_divergence` has compared all weights bitwise.
        row = [count, shard, "yes"]
        for state, reference in zip(own, weights[0], strict=True):
            difference = WeightDifference.between(state, reference)
            apart = "bit-identical" if difference.identical else f"{difference.absolute:.2g}"
            row.append("" if count == 1 else apart)
        rows.append(row)
    console.say()
    presentation.show(
        f"LeNet, batch {size}: largest difference of a weight from the training on one device",
        ["devices", "images on each", "its devices equal?", *(f"after {n} steps" for n in _STEPS)],
        rows,
    )


def _show_all_reduce(counts: list[int], size_bytes: int) -> None:
    rows = [
        [count, *(f"{all_reduce_cost(name, count)[1] * size_bytes:,.0f}" for name in _ALGORITHMS)]
        for count in counts
        if count > 1
    ]
    presentation.show(
        f"bytes through the busiest connection in a step (a gradient has {size_bytes:,})",
        ["devices", *_ALGORITHMS],
        rows,
    )


def _show_times(config: DemoConfig, counts: list[int], simulated: bool) -> None:
    """Measures a step on each number of devices in turn, and prints the conclusion."""
    with StepProgress(1) as progress:
        samples = measure(
            create_cases(config, counts, simulated), repeats=_ROUNDS, progress=progress
        ).samples
    print_times(samples)


def create_cases(config: DemoConfig, counts: list[int], simulated: bool) -> list[Case]:
    """Returns a training on each number of devices, of the same device type as before."""
    options = {"device": "cpu" if simulated else "gpu", "num_gpus": None, "recipe": "fast"}
    return [
        Case(config.for_training(num_devices=count, last_batch="drop", **options))
        for count in counts
    ]


def print_times(samples: list[Sample]) -> None:
    """Prints the time of a step on each number of devices, and the conclusion."""
    simulated = any(s.facts.simulated_devices for s in samples)
    rows = []
    for s in samples:
        ratio = interval.ratio(s.rates, samples[0].rates)
        step_ms = interval.median([1000 * sec for sec in s.step_secs])
        rows.append(
            [s.facts.num_replicas, presentation.whole(step_ms), "" if s is samples[0] else ratio]
        )
    console.say()
    presentation.show(
        f"milliseconds of a step, medians of {_ROUNDS} rounds in turn, with 95 % intervals",
        ["devices", "ms of a step", "times as fast as the first"],
        rows,
        simulated=simulated,
    )
    presentation.end(
        "Within one training, the weights of all devices are always bitwise identical. Two"
        " trainings differ in the last digits: with more shards, sums are added in another"
        " order, and training amplifies that (early steps can nearly double it). The"
        " accuracy curves coincide nevertheless; verify tells rounding from an error, step"
        " by step.",
        *(
            [
                "The times do not predict 16 real devices: these share"
                f" {console.count(samples[0].facts.cores, 'core')}. What grows here is the cost"
                " of a device besides its images: a copy of each operation, and the all-reduce."
                " Real devices have the same cost, and a smaller shard: with 16 images on each,"
                " there is little work left to divide. More devices need a larger batch."
            ]
            if simulated
            else []
        ),
        then=[
            "verify --strategies=single,manual --steps=5    (is it rounding?)",
            "explain --num_devices=2,3,4    (where the time of a step goes)",
            "plan --num_workers=8",
            "demo scale",
        ],
    )
