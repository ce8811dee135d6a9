"""Breaks down the time of a step by leaving out one part at a time, and predicts more devices."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from app.config import ExplainConfig
from app.config.training_configs import training_config
from app.devices.device_setup import num_cores
from app.performance import interval
from app.performance.all_reduce_model import AllReduceModel, AllReduceTime, LinearCost
from app.performance.case import Case, Sample
from app.performance.interval import Interval
from app.performance.rounds import Measured


@dataclasses.dataclass(frozen=True)
class Design:
    """The measurements for a step-time breakdown.

    Attributes:
        full: number of devices, ascending → the whole step; the first one is explained, the last of
            three or more is held out.
        without_all_reduce: the explained step, in which each replica uses its own gradient.
        without_input: the same step on one repeated batch.
        alone: number of devices → a single replica with its shard for that number.
    """

    full: Mapping[int, Case]
    without_all_reduce: Case
    without_input: Case
    alone: Mapping[int, Case]

    @property
    def cases(self) -> list[Case]:
        """Returns all cases, in the order in which they are prepared."""
        return [
            *self.full.values(),
            self.without_all_reduce,
            self.without_input,
            *self.alone.values(),
        ]

    @classmethod
    def of(cls, config: ExplainConfig, *, simulated: bool) -> "Design":
        """Plans the measurements of one strategy.

        Args:
            config: options of `explain`.
            simulated: whether devices share a processor. A single replica then gets the cores that
                it has in the explained step, which separates its own cost from the contention.
        """
        counts = config.num_devices
        full = {n: Case(config.for_training(num_devices=n, last_batch="drop")) for n in counts}
        explained = full[counts[0]]
        alone = training_config(config, "single", last_batch="drop")
        return cls(
            full=full,
            without_all_reduce=dataclasses.replace(explained, no_sync=True),
            without_input=dataclasses.replace(explained, reads_input=False),
            alone={
                n: Case(
                    dataclasses.replace(alone, global_batch_size=-(-config.global_batch_size // n)),
                    reads_input=False,
                    cores=max(1, num_cores() // counts[0]) if simulated else None,
                )
                for n in (1, *(counts[:-1] if len(counts) > 2 else counts))
            },
        )


@dataclasses.dataclass(frozen=True)
class Part:
    """One part of a step's time.

    Attributes:
        name: name of the part.
        sec: seconds.
        share: fraction of the whole step.
    """

    name: str
    sec: Interval
    share: Interval


@dataclasses.dataclass(frozen=True)
class Prediction:
    """The time of a step on a number of devices, predicted and possibly measured.

    Attributes:
        num_replicas: number of replicas.
        predicted_sec: predicted seconds of a step.
        measured_sec: measured seconds of a step; None if not measured.
        held_out: whether the measurement was not used for the prediction.
    """

    num_replicas: int
    predicted_sec: float
    measured_sec: float | None
    held_out: bool

    @property
    def error(self) -> float | None:
        """Relative error of the prediction."""
        return self.measured_sec and self.predicted_sec / self.measured_sec - 1


@dataclasses.dataclass(frozen=True)
class StepTimeBreakdown:
    """The breakdown of a step.

    Attributes:
        parts: parts of the explained step, which add up to it.
        step_sec: seconds of the whole step.
        all_reduce_times: times of the all-reduce alone, for several sizes and numbers of replicas.
        gradient_all_reduce: number of replicas → time of the all-reduce of this model's gradients.
        all_reduce_model: model fitted to these times, without the largest number of replicas.
        compute: cost model fitted to a single replica.
        overhead: relative time of a step beyond its parts; the mean over the steps of the fit.
        predictions: predictions for each measured number of devices, and for some more.
        break_even_batch: global batch from which two devices are faster than one; None if there is
            none.
        speed_up: speed-up over one device with the same global batch.
    """

    parts: list[Part]
    step_sec: Interval
    all_reduce_times: list[AllReduceTime]
    gradient_all_reduce: dict[int, AllReduceTime]
    all_reduce_model: AllReduceModel
    compute: LinearCost
    overhead: float
    predictions: list[Prediction]
    break_even_batch: float | None
    speed_up: Interval


def break_down_step(design: Design, measured: Measured) -> StepTimeBreakdown:
    """Breaks down a step.

    Args:
        design: the measurements.
        measured: results of its cases, in order, with the times of all-reduces for all numbers of
            replicas; the last one of each number is for the model's own gradients.
    """
    samples = iter(measured.samples)
    full = {n: next(samples) for n in design.full}
    without_all_reduce, without_input = next(samples), next(samples)
    alone = {n: next(samples) for n in design.alone}
    all_reduce_times = measured.all_reduce_times
    explained, *others = full
    held_out = others[-1] if len(others) > 1 else None
    whole = full[explained]
    cores = alone[explained].case.cores
    waits = _share_of_cores(whole, explained, cores)
    compute_secs = [sec * waits for sec in alone[explained].step_secs]
    parts = _parts(
        whole.step_secs, without_all_reduce.step_secs, without_input.step_secs, compute_secs
    )
    batch = whole.facts.global_batch_size
    compute = LinearCost.fit(
        [s.facts.global_batch_size for s in alone.values()],
        [float(np.median(s.step_secs)) for s in alone.values()],
    )
    in_fit = [n for n in full if n != held_out]
    model = AllReduceModel.fit(
        whole.facts.all_reduce,
        [t for t in all_reduce_times if t.num_replicas in in_fit],
        shared=whole.facts.simulated_devices,
    )
    size = whole.facts.gradient_bytes

    def parts_sec(n: int) -> float:
        return compute.sec(batch / n) * _share_of_cores(whole, n, cores) + model.sec(n, size)

    step_sec = {n: float(np.median(s.step_secs)) for n, s in full.items()}
    overhead = float(np.mean([step_sec[n] / parts_sec(n) - 1 for n in in_fit]))
    largest = max(full)
    further = [n for n in (2 * largest, 4 * largest) if n <= batch]
    return StepTimeBreakdown(
        parts=parts,
        step_sec=interval.median(whole.step_secs),
        all_reduce_times=list(all_reduce_times),
        gradient_all_reduce={t.num_replicas: t for t in all_reduce_times},
        all_reduce_model=model,
        compute=compute,
        overhead=overhead,
        predictions=[
            Prediction(n, (1 + overhead) * parts_sec(n), step_sec.get(n), n == held_out)
            for n in (*full, *further)
        ],
        break_even_batch=_break_even_batch(compute, model.sec(2, size), overhead),
        speed_up=interval.ratio(alone[1].step_secs, whole.step_secs),
    )


def _parts(*per_round_secs: Sequence[float]) -> list[Part]:
    """Returns the parts of a step, which add up to it.

    Args:
        *per_round_secs: seconds of the whole step, of a step without all-reduce, of a step without
            input, and of a replica's computation.
    """
    secs = {
        "compute": (lambda full, no_sum, no_input, alone: alone),
        "all-reduce": (lambda full, no_sum, no_input, alone: full - no_sum),
        "input": (lambda full, no_sum, no_input, alone: full - no_input),
        "everything else": (lambda full, no_sum, no_input, alone: no_sum + no_input - full - alone),
    }
    return [
        Part(
            name,
            interval.combine(sec, *per_round_secs),
            interval.combine(lambda full, *rest, sec=sec: sec(full, *rest) / full, *per_round_secs),
        )
        for name, sec in secs.items()
    ]


def _share_of_cores(sample: Sample, num_replicas: int, cores: int | None) -> float:
    """Returns the slowdown of a replica beside others, relative to a single replica.

    Real devices share nothing. Logical devices share the cores, of which a single replica was given
    `cores`.
    """
    if cores is None:
        return 1.0
    return max(1.0, num_replicas * cores / sample.facts.cores)


def _break_even_batch(compute: LinearCost, all_reduce_sec: float, overhead: float) -> float | None:
    """Returns the global batch B from which two devices are faster than one.

    Compares fixed + each · B on one device with (fixed + each · B / 2 + all-reduce) · (1 +
    overhead).
    """
    saved = compute.example_sec * (1 - (1 + overhead) / 2)
    if saved <= 0:
        return None
    lost = (1 + overhead) * (compute.fixed_sec + all_reduce_sec) - compute.fixed_sec
    return max(2.0, lost / saved)
