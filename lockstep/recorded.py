"""One step of a recording."""

import functools
from collections.abc import Iterator

import numpy as np

from lockstep.data.trace import CLIP_FIRST, REDUCE_FIRST, Trace
from lockstep.numeric.arrays import (
    Array,
    Named,
    add_named,
    distance,
    joined,
    norm,
    ratio,
    same_bits,
    scaled_all,
)
from lockstep.oracles import Batch


class Step:
    """A recorded step; it holds the arrays that were read of it.

    Args:
        trace: the trace.
        position: position of the step in the trace, from 0.

    Attributes:
        number: number of the step, from 0.
    """

    def __init__(self, trace: Trace, position: int):
        self.trace, self.position, self.number = trace, position, trace.steps[position]
        self._arrays: dict[str, list[list[Array]]] = {}
        self._named: dict[str, list[Named]] = {}

    @property
    def shards(self) -> range:
        """The numbers of the shards."""
        return self.trace.shards

    @property
    def copies(self) -> range:
        """The numbers of the copies of the weights."""
        return self.trace.copies

    @property
    def has_several(self) -> bool:
        """Whether several shards or copies take part."""
        return len(self.shards) > 1 or len(self.copies) > 1

    def has(self, *kinds: str) -> bool:
        """Returns whether arrays of each kind were recorded in this step."""
        return all(self.trace.has(self.position, kind) for kind in kinds)

    def arrays(self, kind: str) -> list[list[Array]]:
        """Returns the arrays of each shard or copy, without those that do not exist."""
        if kind not in self._arrays:
            items = self.trace.items(kind)
            found = [self.trace.arrays(self.position, kind, item) or [] for item in items]
            self._arrays[kind] = [[array for array in each if array is not None] for each in found]
        return self._arrays[kind]

    def named(self, kind: str) -> list[Named]:
        """Returns the variables or gradients of each shard or copy, by name."""
        if kind not in self._named:
            items = self.trace.items(kind)
            self._named[kind] = [self.trace.named(self.position, kind, i) or {} for i in items]
        return self._named[kind]

    @functools.cached_property
    def starts(self) -> list[Named]:
        """The variables of each copy from which its update starts.

        A script may change them before that, as a first forward pass that initialises weights.
        """
        changed = [self.trace.named(self.position, "set", copy) or {} for copy in self.copies]
        return [own | set_ for own, set_ in zip(self.named("before"), changed, strict=True)]

    @functools.cached_property
    def ends(self) -> list[Named]:
        """The variables of each copy at the end of the step.

        A script may change them after the update: it averages, sends or clips weights itself. What
        a copy gets when it has ended, and others train on, is no longer of this step.
        """
        is_last = self.position == len(self.trace.steps) - 1
        ended = [] if is_last else self.trace.absent(self.position + 1)
        later = [
            {} if copy in ended else self.trace.named(self.position, "left", copy) or {}
            for copy in self.copies
        ]
        return [own | left for own, left in zip(self.named("after"), later, strict=True)]

    def unlike_first(self, kind: str) -> Iterator[tuple[str, list[int], float]]:
        """Yields name, copies and distance of each variable that differs from that of copy 0."""
        first, *others = self.ends if kind == "after" else self.named(kind)
        for name, value in first.items():
            unlike = {
                copy: distance(other[name], value)
                for copy, other in enumerate(others, start=1)
                if name in other and not same_bits(other[name], value)
            }
            if unlike:
                yield name, list(unlike), ratio(max(unlike.values()), norm(value))

    @functools.cached_property
    def previous(self) -> "Step | None":
        """The previous step, if it was recorded, too."""
        if self.position == 0 or self.trace.steps[self.position - 1] != self.number - 1:
            return None
        return Step(self.trace, self.position - 1)

    def state(self, shard: int, kind: str = "before") -> Named:
        """Returns the variables of a shard before or "after": of its copy, and its statistics."""
        copy = self.named(kind)[self.trace.copy_of(shard)]
        return copy | (self.named(f"own_{kind}")[shard] if self.has(f"own_{kind}") else {})

    @functools.cached_property
    def data(self) -> list[Batch]:
        """The examples of each shard."""
        return self.arrays("data") if self.has("data") else [[] for _ in self.shards]

    @property
    def whole(self) -> Batch:
        """The examples of all shards."""
        return joined(self.data)

    @property
    def sizes(self) -> list[int]:
        """The number of examples of each shard; 0 where it is unknown."""
        return [sum(map(len, self.inputs(shard))) for shard in self.shards]

    def inputs(self, shard: int) -> list[np.ndarray]:
        """Returns the first leaf with rows of the examples of each forward pass of a shard."""
        data = self.data[shard]
        leaves = max(1, len(data) // self.trace.micro_batches(self.position, shard))
        first = next((i for i, array in enumerate(data[:leaves]) if array.ndim), 0)
        return [array for array in data[first::leaves] if array.ndim]

    @property
    def kind_of_loss(self) -> str:
        """The kind of the losses: what the shards' steps compute, or only differentiate."""
        return "loss" if self.has("loss") else "objective"

    def of_kind(self, *kinds: str) -> list[str]:
        """Returns the names of the variables of some kinds."""
        return [name for name, kind in self.trace.kinds.items() if kind in kinds]

    @property
    def clips_sum(self) -> bool:
        """Whether gradients are clipped after the sum."""
        return self.trace.about.order == REDUCE_FIRST

    @property
    def kind_sent(self) -> str:
        """The kind of the gradients before the all-reduce."""
        clips_first = self.trace.about.order == CLIP_FIRST
        return "clipped" if clips_first and self.has("clipped") else "raw"

    def applied(self, copy: int) -> Named:
        """Returns the gradients that the optimizer of a copy applies; empty if unknown."""
        for kind in ("clipped", "sums") if self.clips_sum else ("sums",):
            if self.has(kind):
                return self.named(kind)[copy]
        if not self.has(self.kind_sent):
            return {}
        sent = self.named(self.kind_sent)
        if self.trace.calls(self.position, copy) and not self.trace.about.reduction:
            return {}  # The script reduces them itself, and clears them before the update.
        if len(sent) < 2:
            return sent[0]
        return scaled_all(add_named(sent), self.share(0))

    def entering(self, copy: int) -> Named:
        """Returns a copy's gradients before clipping, as the script has left them; {} if unknown.

        A script may divide or sum them itself after the backward pass.
        """
        if own := self.trace.named(self.position, "unclipped", copy):
            return own
        is_known = self.trace.calls(self.position, copy) and self.has("clipped") and self.clips_sum
        return self.named("clipped")[copy] if is_known else {}

    @functools.cached_property
    def changed_by_hand(self) -> Named:
        """The whole gradient before clipping, if the script has changed what the sum gave."""
        entering = self.entering(0)
        if self.has("sums"):
            received = self.named("sums")[0]
        elif self.has("raw") and len(self.shards) == 1:
            received = self.named("raw")[0]
        else:
            return entering
        is_same = all(
            name in received and same_bits(g, received[name]) for name, g in entering.items()
        )
        return {} if is_same else entering

    def share(self, shard: int) -> float:
        """Returns a shard's share of the sum: 1, or one over the number of shards for a mean."""
        return 1 / len(self.shards) if self.trace.about.reduction == "mean" else 1.0
