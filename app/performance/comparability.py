"""Decides whether two measurements are comparable, and lists the caveats."""

import dataclasses
from collections.abc import Iterator, Sequence

from app.performance.case import Sample

# With fewer rounds the bootstrap is overconfident: with 2 it is right in half of all cases.
MIN_ROUNDS = 5


@dataclasses.dataclass(frozen=True)
class Caveat:
    """A caveat of a comparison.

    Attributes:
        refuses: whether no ratio is given; otherwise it is given with a mark.
        text: the caveat.
    """

    refuses: bool
    text: str


# Axes of comparison; everything else must be equal. `scaling` compares numbers of devices, strong
# with a fixed global batch, weak with a fixed batch per device.
AXES = ("strong scaling", "weak scaling", "strategy", "precision")


def find_caveats(first: Sample, second: Sample, axis: str) -> list[Caveat]:
    """Returns the caveats of comparing two cases along one of `AXES`."""
    return [*_refusals(first, second, axis), *_marks(first, second, axis)]


def _refusals(first: Sample, second: Sample, axis: str) -> Iterator[Caveat]:
    a, b = first.facts, second.facts
    if first.case.config.model != second.case.config.model:
        yield Caveat(True, "another model")
    if a.jit_compile != b.jit_compile:
        yield Caveat(True, "XLA on one side only")
    if a.dataset != b.dataset:
        yield Caveat(True, f"other images: {a.dataset} and {b.dataset}")
    if axis == "weak scaling":
        sizes = [facts.global_batch_size / facts.num_devices for facts in (a, b)]
        if sizes[0] != sizes[1]:
            yield Caveat(True, f"another batch for each device: {sizes[0]:g} and {sizes[1]:g}")
    elif a.global_batch_size != b.global_batch_size:
        yield Caveat(True, f"another global batch: {a.global_batch_size} and {b.global_batch_size}")
    if axis != "precision" and a.compute_dtype != b.compute_dtype:
        yield Caveat(True, f"another precision: {a.compute_dtype} and {b.compute_dtype}")
    if a.tensor_float_32 != b.tensor_float_32:
        yield Caveat(True, "TF32 on one side only")
    for sample in (first, second):
        traced = sum(block.tracings for block in sample.blocks)
        if traced:
            yield Caveat(True, f"{sample.case.name} was traced {traced} times while it was timed")
    if len(first.blocks) != len(second.blocks):
        yield Caveat(True, "measured in other rounds")
    elif len(first.blocks) < MIN_ROUNDS:
        yield Caveat(True, f"fewer than {MIN_ROUNDS} rounds; use more --repeats")


def _marks(first: Sample, second: Sample, axis: str) -> Iterator[Caveat]:
    a, b = first.facts, second.facts
    counts = {facts.num_devices for facts in (a, b)}
    if axis.endswith("scaling") and any(facts.simulated_devices for facts in (a, b)):
        cores = min(a.cores, b.cores)
        yield Caveat(
            False,
            f"simulated devices: {max(counts)} share {cores} cores, all of which one device"
            " would use; ideal is 1, and this is not scaling",
        )
    algorithms = {a.all_reduce, b.all_reduce} - {"none"}
    if axis == "strategy" and len(algorithms) == 2:
        yield Caveat(False, f"another all-reduce: {a.all_reduce} and {b.all_reduce}")
    if axis == "precision" and a.tensor_float_32:
        yield Caveat(False, "float32 products are rounded to TF32")
    if a.versions != b.versions:
        yield Caveat(False, "other versions of what numbers depend on")


def setup_caveats(samples: Sequence[Sample]) -> list[str]:
    """Returns the caveats that concern all measurements."""
    facts = [s.facts for s in samples]
    lines = []
    if len(samples[0].blocks) < MIN_ROUNDS:
        lines.append(
            f"fewer than {MIN_ROUNDS} rounds: intervals hold the truth less often than they say;"
            " use more --repeats"
        )
    traced = [s.case.name for s in samples if any(block.tracings for block in s.blocks)]
    if traced:
        lines.append(f"traced while it was timed, so its times are not valid: {'; '.join(traced)}")
    if any(f.simulated_devices for f in facts):
        lines.append(
            f"simulated devices: logical devices share {facts[0].cores} cores, so times say nothing"
            " of scaling, only what a strategy costs"
        )
    if any(f.tensor_float_32 for f in facts):
        lines.append("TF32 is on: float32 products round their inputs to 10 bits")
    if any(f.dataset == "synthetic" for f in facts):
        lines.append("generated images: the speed is that of real ones, accuracy is not measured")
    return lines
