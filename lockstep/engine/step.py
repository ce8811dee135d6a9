"""One recorded step of a training."""

import functools

import numpy as np

from lockstep.data.trace import CLIP_FIRST, REDUCE_FIRST, Trace
from lockstep.numeric.arrays import Array, Named, add_named, scaled_all


class Step:
    """A recorded step; it keeps the arrays that were read of it.

    Args:
        trace: the recording.
        position: position of the step in the recording, from 0.

    Attributes:
        number: number of the step in the training, from 0.
    """

    def __init__(self, trace: Trace, position: int) -> None:
        self.trace, self.position, self.number = trace, position, trace.steps[position]
        self._arrays: dict[str, list[list[Array]]] = {}
        self._named: dict[str, list[Named]] = {}

    @property
    def shards(self) -> range:
        """The parts of the batch, each with its own loss."""
        return self.trace.shards

    @property
    def copies(self) -> range:
        """The copies of the weights: the ranks, or replicas."""
        return self.trace.copies

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

    # State.

    @functools.cached_property
    def starts(self) -> list[Named]:
        """The variables of each copy from which its update starts.

        A script may change them before that, as a first forward pass that initialises weights.
        """
        changed = [self.trace.named(self.position, "set", copy) or {} for copy in self.copies]
        return [own | set_ for own, set_ in zip(self.named("before"), changed, strict=True)]

    @functools.cached_property
    def left(self) -> list[Named]:
        """The variables that each copy changes between its update and the end of the step.

        What a copy gets when it has ended, and others train on, is no longer of this step.
        """
        is_last = self.position == len(self.trace.steps) - 1
        ended = [] if is_last else self.trace.absent(self.position + 1)
        return [
            {} if copy in ended else self.trace.named(self.position, "left", copy) or {}
            for copy in self.copies
        ]

    @functools.cached_property
    def ends(self) -> list[Named]:
        """The variables of each copy at the end of the step."""
        return [own | left for own, left in zip(self.named("after"), self.left, strict=True)]

    @functools.cached_property
    def own_starts(self) -> list[Named]:
        """The variables of each copy before the step, before another training's were loaded."""
        return self.named("replaced" if self.has("replaced") else "before")

    @functools.cached_property
    def previous(self) -> "Step | None":
        """The previous step, if it was recorded, too."""
        if self.position == 0 or self.trace.steps[self.position - 1] != self.number - 1:
            return None
        return Step(self.trace, self.position - 1)

    def of_kind(self, *kinds: str) -> list[str]:
        """Returns the names of the variables of some kinds."""
        return [name for name, kind in self.trace.kinds.items() if kind in kinds]

    # Examples and loss.

    @functools.cached_property
    def data(self) -> list[list[np.ndarray]]:
        """The examples of each shard."""
        return self.arrays("data") if self.has("data") else [[] for _ in self.shards]

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

    # Gradients.

    @property
    def clips_sum(self) -> bool:
        """Whether gradients are clipped after the sum."""
        return self.trace.about.order == REDUCE_FIRST

    def calls(self, shard: int) -> tuple[str, ...]:
        """Returns the calls that make the gradients of a shard, as "clip norm 1"."""
        return self.trace.calls(self.position, shard)

    def updated_before(self, shard: int, number: int) -> set[str]:
        """Returns the weights that a shard has updated in this step before a forward pass."""
        found, passes = set[str](), 0
        settings = self.trace.about_of(shard).settings
        for call in self.calls(shard):
            if call.startswith("update ") and passes <= number:
                groups = settings[self.position][: int(call.split()[1])]
                found.update(name for group in groups for name in group.get("weights", ()))
            passes += call == "forward"
        return found

    def applied(self, copy: int) -> Named:
        """Returns the gradients that the optimizer of a copy applies; empty if unknown."""
        for kind in ("clipped", "sums") if self.clips_sum else ("sums",):
            if self.has(kind):
                return self.named(kind)[copy]
        clips_first = self.trace.about.order == CLIP_FIRST and self.has("clipped")
        kind = "clipped" if clips_first else "raw"
        if not self.has(kind):
            return {}
        sent = self.named(kind)
        if self.calls(copy) and not self.trace.about.reduction:
            return {}  # The script reduces them itself, and clears them before the update.
        return sent[0] if len(sent) < 2 else scaled_all(add_named(sent), self.share)

    def entering(self, copy: int) -> Named:
        """Returns a copy's gradients before clipping, as the script has left them; {} if unknown.

        A script may divide or sum them itself after the backward pass.
        """
        if own := self.trace.named(self.position, "unclipped", copy):
            return own
        is_known = self.calls(copy) and self.has("clipped") and self.clips_sum
        return self.named("clipped")[copy] if is_known else {}

    @property
    def share(self) -> float:
        """A shard's share of the sum: 1, or one over the number of shards for a mean."""
        return 1 / len(self.shards) if self.trace.about.reduction == "mean" else 1.0
