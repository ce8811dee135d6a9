"""What two recordings lack, and what of them was not compared: said beside a verdict."""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from lockstep.data.trace import STATISTIC, Trace
from lockstep.engine import settings
from lockstep.engine.pair import Pair

NUM_SHOWN = 3


@dataclasses.dataclass
class Missing:
    """What is missing of a training, of its reference, or of their comparison.

    Attributes:
        reference: what the training was compared with.
        training: the training.
        pairs: the steps that both have; at least one.
    """

    reference: Trace
    training: Trace
    pairs: Sequence[Pair]

    @functools.cached_property
    def changes(self) -> list[dict[int, set[str]]]:
        """For both recordings: number of a step → the weights that change in it."""
        return [trace.changes for trace in (self.reference, self.training)]

    @functools.cached_property
    def changed(self) -> list[set[str]]:
        """For both recordings the weights that change in some step, or whose update is unknown."""
        return [trace.changed_weights for trace in (self.reference, self.training)]

    @functools.cached_property
    def apart(self) -> list[int]:
        """The steps that start from other states, and are not compared."""
        return [p.number for p in self.pairs if p.has("before") and not p.starts_equally]

    def of_recordings(self) -> Iterator[str]:
        """Yields why recordings do not have the whole of what was asked for, or are NaN in both."""
        abouts = self.training.about, self.reference.about
        is_alike = len({(about.trained, about.skipped) for about in abouts}) == 1
        for trace, whose in ((self.training, "the training"), (self.reference, "the reference")):
            if trace.about.ended_with:
                yield f"{whose} ended with an exception: {trace.about.ended_with}"
            lacking = sorted({*trace.about.asked} - {*trace.steps})
            if lacking and not (is_alike and len(lacking) <= trace.about.skipped):
                yield f"{whose} lacks steps {_listed(lacking)}, which were to be recorded"
        both = [(pair.reference, pair.training) for pair in self.pairs]
        if broken := [steps[1].number for steps in both if all(map(settings.has_nan, steps))]:
            yield f"outputs or weights are NaN or infinite in both in step {_listed(broken)}"

    def reasons(self, compared: set[str], copied: Sequence[int]) -> Iterator[str]:
        """Yields why a training is not verified.

        Args:
            compared: the training's names of the weights whose updates were compared.
            copied: the steps in which each rank has the whole batch, and computes something else.
        """
        if copied:
            yield (
                f"ranks have the same examples in steps {_listed(copied)}, and compute other"
                " gradients: if they compute parts of one model, pass mesh="
            )
        yield from self.of_recordings()
        if lost := [pair.number for pair in self.pairs if not pair.has("before", "after")]:
            yield f"states of steps {_listed(lost)} were not recorded in both"
        if self.training.about.replayed and self.apart:
            yield f"steps {_listed(self.apart)} do not start from the reference's state"
        if idle := self.reference.about.not_updated or self.training.about.not_updated:
            yield (
                f"the optimizer of {_first(idle)} updates no weight in the recorded steps: record"
                " more steps, as with --steps"
            )
        matching = self.pairs[0].matching
        unmatched = matching.unmatched_first, matching.unmatched_second
        for names, changed in zip(unmatched, self.changed, strict=True):
            if trained := [name for name in names if name in changed]:
                yield f"no weight matches {_first(trained)}: pass --name_map"
        both = [
            p for p in matching.pairs if p.first in self.changed[0] or p.second in self.changed[1]
        ]
        if left := [p.second for p in both if p.second not in compared]:
            yield (
                f"the updates of {_first(left)} were compared in no step: record the state before"
                " and after the same steps, the second time with replay="
            )

    def notes(self) -> Iterator[str]:
        """Yields what was not compared, whatever the verdict is."""
        numbers = [pair.number for pair in self.pairs]
        if left := [number for number in self.training.steps if number not in numbers]:
            yield f"the reference lacks steps {_listed(left)}"
        if self.apart:
            how = "record with replay="
            if self.training.about.sample:
                how = "a sampled recording is replayed from the state before its first step only"
            yield f"{_steps(self.apart)} from other states: {how}"
        if number := self.training.about.skipped:
            yield f"{number} updates are skipped, as gradients overflow: they are no steps"
        not_loaded = [
            name for copy in self.training.copies
            for name in self.training.of_replica.get(copy, self.training.about).not_loaded
        ]  # fmt: skip
        if not_loaded:
            yield f"not loaded by replay=: {_first([*dict.fromkeys(not_loaded)])}"
        both = self.reference, self.training
        yield from dict.fromkeys(f"not compared: {x}" for t in both for x in t.about.left_out)
        for position, number in enumerate(self.training.steps):
            if absent := self.training.absent(position):
                names = ", ".join(self.training.name_of("after", copy) for copy in absent)
                yield f"{names} ended before step {number}: the others are compared"

    def notes_of_right(self) -> Iterator[str]:
        """Yields of a training without a fault what of it shows less than a whole step does."""
        numbers = [pair.number for pair in self.pairs]
        idle = [n for n in numbers if not any(changes.get(n) for changes in self.changes)]
        if idle and any(self.changed):
            yield f"nothing to verify in steps {_listed(idle)}: no weight changes"
        optimized = settings.optimized_weights(self.training) or set()
        if kept := sorted(optimized - self.changed[1]) if self.changed[1] else []:
            yield f"{len(kept)} of {len(optimized)} weights change in no step: {_first(kept)}"
        if not any(pair.names for pair in self.pairs):
            yield (
                "gradients are not compared: they are not recorded in both; weights and state are,"
                " in which a factor that clipping removes does not show"
            )
        first = self.pairs[0]
        statistics = [v for v in first.variables if v.kind == STATISTIC]
        ranks = [copy for copy in first.copies if copy]
        if any(first.right(v, copy) is None for v in statistics for copy in ranks):
            yield "statistics of other ranks than the first: more than a forward pass changes them"
        matching, slots = first.matching, (self.reference.slots, self.training.slots)
        alone = {
            slot for pair in matching.pairs
            for slot in slots[0].get(pair.first, {}).keys() ^ slots[1].get(pair.second, {}).keys()
        }  # fmt: skip
        if alone and not first.is_port:
            yield f"state of optimizers that only one recording has: {_first(sorted(alone))}"
        if unmatched := [*matching.unmatched_first, *matching.unmatched_second]:
            yield f"not matched: {_first(unmatched)}"
        if sample := self.training.about.sample:
            yield (
                f"larger arrays are compared by {sample['elements']} of their elements and"
                f" {sample['sums']} sums of all"
            )


def _steps(numbers: Sequence[int]) -> str:
    return f"steps {_listed(numbers)} start" if len(numbers) > 1 else f"step {numbers[0]} starts"


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def _first(names: Sequence[str]) -> str:
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more
