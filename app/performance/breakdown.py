"""Breaks down the time of a step by leaving out one part at a time."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from app.devices.device_setup import num_cores
from app.options import Config
from app.performance import interval
from app.performance.case import Case, Sample
from app.performance.interval import Interval
from app.performance.traffic import Traffic
from app.report.result import Block, Table
from strategies import has_option

ALL_REDUCE = "all-reduce"
_COMPUTE, _INPUT, _REST = "compute", "input", "everything else"
_METHODS = {
    _COMPUTE: "one device alone, without input",
    ALL_REDUCE: "the step, less one without it",
    _INPUT: "the step, less one on a fixed batch",
    _REST: "what is left: contention, waiting, sending",
}


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
class Breakdown:
    """The breakdown of a step.

    Attributes:
        case: name of the case.
        parts: parts of the step, which add up to it.
        traffic: bytes between devices.
    """

    case: str
    parts: list[Part]
    traffic: Traffic | None

    def describe(self, name: str) -> list[Block]:
        """Returns the tables for the output; `name` is a short name of the case."""
        header = ["part", "ms", "95 % interval", "share", "how it was found"]
        rows = [
            [
                part.name,
                f"{part.sec.value * 1e3:.2f}",
                f"{part.sec.low * 1e3:.2f} to {part.sec.high * 1e3:.2f}",
                f"{part.share.value:.1%}" if part.sec.low > 0 else "–",
                _METHODS[part.name],
            ]
            for part in self.parts
        ]
        blocks: list[Block] = [Table(f"where a step of {name} goes", header, rows)]
        return blocks + (self.traffic.describe(name) if self.traffic else [])


def cases_without(case: Case, config: Config) -> dict[str, Case]:
    """Returns part of a step → the case that measures a step without this part.

    "compute" is one device alone: with the shard of one replica and its share of the cores if
    the strategy splits the batch alone, else with the whole batch.

    Args:
        case: a strategy on several devices, without workers.
        config: options of the command.
    """
    training = case.config
    number = training.num_devices_asked or 1
    splits_batch_only = has_option(training.distribution.strategy, "all_reduce")
    shard = -(-training.training.global_batch_size // number)
    alone = config.for_training(
        "single",
        model=training.training.model,
        precision=training.training.precision,
        global_batch_size=shard if splits_batch_only else training.training.global_batch_size,
        last_batch="drop",
    )
    cores = max(1, num_cores() // number) if splits_batch_only else None
    without = {_COMPUTE: Case(alone, reads_input=False, cores=cores)}
    without[_INPUT] = dataclasses.replace(case, reads_input=False, counts_traffic=False)
    if splits_batch_only:
        without[ALL_REDUCE] = dataclasses.replace(case, no_sync=True, counts_traffic=False)
    return without


def break_down(whole: Sample, without: Mapping[str, Sample]) -> Breakdown:
    """Breaks down a step.

    Args:
        whole: the step.
        without: part of a step → the sample of `cases_without`.
    """
    scale = _scale_of_one_device(whole, without[_COMPUTE])
    alone = [scale * sec for sec in without[_COMPUTE].step_secs]
    left_out = [name for name in (ALL_REDUCE, _INPUT) if name in without]
    samples = [whole.step_secs, alone, *(without[name].step_secs for name in left_out)]

    def secs_of(*medians: Any) -> dict[str, Any]:
        """Returns the seconds of each part, from a number or an array for each of the samples."""
        full, computing, *shorter = medians
        secs = {_COMPUTE: computing}
        secs |= {name: full - sec for name, sec in zip(left_out, shorter, strict=True)}
        return secs | {_REST: full - sum(secs.values())}

    parts = []
    for name in (_COMPUTE, *left_out, _REST):
        sec = interval.combine(lambda *m, name=name: secs_of(*m)[name], *samples)
        share = interval.combine(lambda *m, name=name: secs_of(*m)[name] / m[0], *samples)
        parts.append(Part(name, sec, share))
    return Breakdown(whole.case.name, parts, whole.traffic)


def _scale_of_one_device(whole: Sample, alone: Sample) -> float:
    """Returns the time of a step's computation on all devices over that of one device alone.

    Real devices share nothing. Logical devices share the cores, of which the one device was given
    some; devices that split the layers or channels share the work.
    """
    number, is_simulated = whole.facts.num_devices, whole.facts.simulated_devices
    if alone.case.cores is None:
        return 1.0 if is_simulated else 1 / number
    return max(1.0, number * alone.case.cores / whole.facts.cores) if is_simulated else 1.0
