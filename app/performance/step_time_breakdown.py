"""Where a step's time goes, by leaving one part out at a time; what more devices would do."""

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
    """What has to be measured to take a step apart.

    Attributes:
        full: number of devices, rising → the whole step; the first one is what is explained, the
            last of three or more is held out.
        without_all_reduce: the step that is explained, each replica going on with its own gradient.
        without_input: the same, on one batch again and again.
        alone: number of devices → one replica by itself, with the shard that it has then.
    """

    full: Mapping[int, Case]
    without_all_reduce: Case
    without_input: Case
    alone: Mapping[int, Case]

    @property
    def cases(self) -> list[Case]:
        """Returns all of them, in the order in which they are prepared."""
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
            config: of `explain`.
            simulated: whether devices share a processor. A replica by itself is then given the
                cores that it has in the explained step: what it needs can so be told from what the
                others leave it.
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
        name: what it is.
        sec: how long.
        share: of the whole step.
    """

    name: str
    sec: Interval
    share: Interval


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What a number of devices takes, measured or not.

    Attributes:
        num_replicas: how many.
        predicted_sec: of a step.
        measured_sec: of a step, None where it was not measured.
        held_out: whether nothing of it went into the prediction, though it was measured.
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
    """A step taken apart.

    Attributes:
        parts: of the step that is explained; they add up to it.
        step_sec: the whole of it.
        all_reduce_times: of the all-reduce alone, of several sizes and numbers of replicas.
        gradient_all_reduce: number of replicas → the all-reduce of this model's gradients.
        all_reduce_model: what was fitted to those but for the largest number of replicas.
        compute: what was fitted to one replica by itself.
        overhead: what a step takes over its parts, relative; the mean over those in the fit.
        predictions: for each number of devices that was measured, and for some more.
        break_even_batch: the global batch from which two devices are faster than one, None where
            no batch is.
        speed_up: of the devices explained against one of them by itself, the same global batch.
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
    """Takes a step apart.

    Args:
        design: what was measured.
        measured: its cases, in their order, with times of the all-reduces of all numbers of
            replicas; the last one of each number is of the model's own gradients.
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
    """Returns what adds up to a step.

    Args:
        *per_round_secs: of the whole step, of one without the exchange, of one without input, and
            of what a replica computes.
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
    """Returns how much longer a replica takes than by itself, there being so many of them.

    Real devices do not share anything. Logical ones share the cores, of which a replica by itself
    was given so many.
    """
    if cores is None:
        return 1.0
    return max(1.0, num_replicas * cores / sample.facts.cores)


def _break_even_batch(compute: LinearCost, all_reduce_sec: float, overhead: float) -> float | None:
    """Returns the global batch B from which two devices, each as fast as one alone, are faster.

    fixed + each · B on one device, (fixed + each · B / 2 + exchange) · (1 + overhead) on two.
    """
    saved = compute.example_sec * (1 - (1 + overhead) / 2)
    if saved <= 0:
        return None
    lost = (1 + overhead) * (compute.fixed_sec + all_reduce_sec) - compute.fixed_sec
    return max(2.0, lost / saved)
