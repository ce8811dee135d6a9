"""Where the time of a step goes whose strategy has no all-reduce that can be left out."""

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
    """What has to be measured.

    Attributes:
        full: number of devices, rising → the whole step; the first one is what is explained.
        without_input: the same, on one batch again and again.
        alone: one device with the whole batch, without input.
    """

    full: Mapping[int, Case]
    without_input: Case
    alone: Case

    @property
    def cases(self) -> list[Case]:
        """Returns all of them, in the order in which they are prepared."""
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
    """A step taken apart.

    Attributes:
        parts: of the step that is explained; they add up to it.
        step_sec: the whole of it.
        images_per_sec: number of devices → throughput; 1 is `single`, without input.
        speed_up: of the devices explained against one of them with the same batch.
    """

    parts: list[Part]
    step_sec: Interval
    images_per_sec: dict[int, Interval]
    speed_up: Interval


def break_down_split(design: SplitDesign, measured: Measured) -> SplitBreakdown:
    """Takes a step apart.

    What one device computes with the whole batch, all devices compute together: logical devices
    share its processor, real ones share the work.

    Args:
        design: what was measured.
        measured: its cases, in their order.
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
