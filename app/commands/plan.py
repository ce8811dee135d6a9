"""`plan`: predicts the cost of a training by arithmetic and, with `--probe`, from a few steps."""

import dataclasses
from collections.abc import Mapping

import numpy as np

from app.cluster.resource_split import visible_gpus
from app.config import PlanConfig, TrainConfig
from app.config.names import NUM_TRAIN_EXAMPLES
from app.config.training_configs import training_config
from app.devices import device_setup
from app.performance.all_reduce_model import LinearCost
from app.performance.case import Case, Sample
from app.performance.rounds import measure
from app.performance.scaling_model import MIN_COUNTS
from app.runtime import console
from app.runtime.progress_bar import StepProgress

_ROUNDS, _PROBE_ROUNDS = 5, 3
_MOST_PROBED = 8  # Devices: a step on more devices is extrapolated.
_LARGEST_SHARD = 256  # Step time is linear in the shard size; larger shards are not measured.


def run(config: PlanConfig) -> None:
    """Prints the plan; does not train or write files."""
    config = _with_all_gpus(config)
    samples = _sample_shards(config) if config.plans_cluster else _probe(config)
    device_setup.set_up(_building(config))
    from app.performance.cluster_plan_output import print_cluster
    from app.performance.plan_output import print_probe, print_training_plan
    from app.performance.training_plan import TrainingPlan

    plan = TrainingPlan.of(config)
    print_training_plan(plan)
    if config.plans_cluster:
        compute = LinearCost.fit(
            [s.facts.global_batch_size for s in samples],
            [float(np.median(s.step_secs)) for s in samples],
        )
        print_cluster(plan, compute, samples)
    elif samples:
        print_probe(plan, samples)
    on_cpu = not config.plans_cluster and (config.device == "cpu" or not visible_gpus())
    for warning in plan.warnings(on_cpu=on_cpu):
        console.warn(warning)


def _with_all_gpus(config: PlanConfig) -> PlanConfig:
    """Sets the number of devices to all GPUs if no flag gives it."""
    decided = config.plans_cluster or config.num_devices_asked
    number = 0 if decided else _num_gpus(config)
    return dataclasses.replace(config, num_gpus=number) if number else config


def _num_gpus(config: PlanConfig) -> int:
    return 0 if config.device == "cpu" else len(visible_gpus())


def _probe(config: PlanConfig) -> list[Sample]:
    """Runs a few steps of the planned training, if requested.

    A number of devices that cannot be measured is replaced by smaller ones with the same shards.
    """
    if not config.probe:
        return []
    batch = min(config.planned_batch_size, NUM_TRAIN_EXAMPLES)
    num_devices = config.num_devices_planned
    if num_devices == 1:
        return _measure([_case(config, "single", batch)], _PROBE_ROUNDS)
    counts = [num_devices] if config.is_split else counts_to_probe(num_devices, _num_gpus(config))
    if counts == [num_devices]:
        return _measure([_case(config, config.strategy, batch)], _PROBE_ROUNDS)
    shard = -(-batch // num_devices)
    cases = [
        _case(config, config.strategy, shard * count, {"num_devices": count, "num_gpus": None})
        for count in counts
    ]
    return _measure(cases, _ROUNDS)


def counts_to_probe(num_devices: int, num_gpus: int) -> list[int]:
    """Returns the numbers of devices to measure: the planned number, or up to four smaller ones.

    Args:
        num_devices: the planned number.
        num_gpus: available GPUs; 0 for logical CPU devices, whose number is not limited.
    """
    most = min(_MOST_PROBED, num_gpus or num_devices)
    if num_devices <= most or most <= MIN_COUNTS:
        return [num_devices]
    return sorted({round(float(count)) for count in np.linspace(2, most, 4)})


def _sample_shards(config: PlanConfig) -> list[Sample]:
    """Measures one device with shards of a cluster, and with larger shards."""
    num_replicas = config.num_workers * config.num_devices_planned
    first = min(-(-config.planned_batch_size // num_replicas), _LARGEST_SHARD)
    sizes = first, 2 * first, 4 * first
    return _measure([_case(config, "single", size) for size in sizes], _ROUNDS)


def _case(
    config: PlanConfig, name: str, batch: int, devices: Mapping[str, int | None] | None = None
) -> Case:
    """Returns a training on generated images that repeats one batch."""
    options = {"num_train_examples": batch, "global_batch_size": batch, "dataset": "synthetic"}
    return Case(training_config(config, name, **options, **(devices or {})), reads_input=False)


def _building(config: PlanConfig) -> TrainConfig:
    """Returns a training config to build the model with; it needs no GPU.

    It does not train, so that a plan may have a batch size that no training on this dataset allows.
    """
    return TrainConfig(strategy="single", device="cpu", verbosity=config.verbosity)


def _measure(cases: list[Case], repeats: int) -> list[Sample]:
    with StepProgress(1) as progress:
        return measure(cases, repeats=repeats, progress=progress).samples
