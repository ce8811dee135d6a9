"""Breaks down the step time of strategies whose all-reduce cannot be left out."""

import dataclasses
from collections.abc import Mapping

from app.config import ExplainConfig
from app.config.training_configs import training_config
from app.performance import interval
from app.performance.case import Case
from app.performance.interval import Interval
from app.performance.rounds import Measured
from app.performance.step_time_breakdown import Part


@dataclasses.dataclass(frozen=True)
class SplitDesign:
    """The measurements for a step-time breakdown.

    Attributes:
        full: number of devices, ascending → the whole step; the first one is explained.
        without_input: the same step on one repeated batch.
        alone: one device with the whole batch, without input.
    """

    full: Mapping[int, Case]
    without_input: Case
    alone: Case

    @property
    def cases(self) -> list[Case]:
        """Returns all cases, in the order in which they are prepared."""
        return [*self.full.values(), self.without_input, self.alone]

    @classmethod
    def of(cls, config: ExplainConfig) -> "SplitDesign":
        """Plans the measurements of one strategy."""
        full = {
            n: Case(config.for_training(num_devices=n, last_batch="drop"))
            for n in config.num_devices
        }
        explained = full[config.num_devices[0]]
        alone = training_config(config, "single", last_batch="drop")
        return cls(
            full,
            dataclasses.replace(explained, reads_input=False),
            Case(alone, reads_input=False),
        )


@dataclasses.dataclass(frozen=True)
class SplitBreakdown:
    """The breakdown of a step.

    Attributes:
        parts: parts of the explained step, which add up to it.
        step_sec: seconds of the whole step.
        images_per_sec: number of devices → throughput; 1 is `single`, without input.
        speed_up: speed-up over one device with the same batch.
    """

    parts: list[Part]
    step_sec: Interval
    images_per_sec: dict[int, Interval]
    speed_up: Interval


def break_down_split(design: SplitDesign, measured: Measured) -> SplitBreakdown:
    """Breaks down a step.

    The compute of one device for the whole batch is what all devices compute together: logical
    devices share its processor, real devices share the work.

    Args:
        design: the measurements.
        measured: results of its cases, in order.
    """
    samples = iter(measured.samples)
    full = {n: next(samples) for n in design.full}
    without_input, alone = next(samples), next(samples)
    whole = full[min(full)]
    shares = 1 if whole.facts.simulated_devices else whole.facts.num_devices
    secs = (
        whole.step_secs,
        without_input.step_secs,
        [sec / shares for sec in alone.step_secs],
    )
    formulas = {
        "compute": lambda full, no_input, alone: alone,
        "input": lambda full, no_input, alone: full - no_input,
        "everything else": lambda full, no_input, alone: no_input - alone,
    }
    parts = [
        Part(
            name,
            interval.combine(formula, *secs),
            interval.combine(lambda full, *rest, f=formula: f(full, *rest) / full, *secs),
        )
        for name, formula in formulas.items()
    ]
    rates = {1: alone.rates} | {n: sample.rates for n, sample in full.items()}
    return SplitBreakdown(
        parts,
        interval.median(whole.step_secs),
        {n: interval.median(values) for n, values in rates.items()},
        interval.ratio(alone.step_secs, whole.step_secs),
    )
