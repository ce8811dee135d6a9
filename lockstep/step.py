"""The gradients of one step in two recordings: the terms of what explains them.

On its way to the update, a gradient is `raw` on each shard, then `given`: what enters clipping, or
the optimizer where nothing is clipped, whatever a script calls it, and then `applied`. All have the
names and layouts of the reference, in float64; the gradient of a weight that a loss does not use is
0.
"""

import functools
from collections.abc import Sequence

import numpy as np

from lockstep.data.match import Matching
from lockstep.data.trace import WEIGHT
from lockstep.numeric.arrays import (
    Array,
    Named,
    add,
    dense,
    distance,
    factor_of,
    norm,
    plain,
    same_bits,
    scaled_all,
    total_norm,
)
from lockstep.numeric.sampling import Sampled, without_sums
from lockstep.recorded import Step

_SAME = 1e-4  # Relative; of gradients that a script divides.


class Gradients:
    """The gradients of a step of a reference, and of the recording that is checked.

    Args:
        first: the step in the reference.
        second: the step in the recording that is checked.
        matching: pairs of variables of both.
    """

    def __init__(self, first: Step, second: Step, matching: Matching):
        self.first, self.second, self._matching = first, second, matching
        self._known: dict[int, tuple[Array, np.ndarray]] = {}

    # Names.

    @functools.cached_property
    def names(self) -> list[str]:
        """The weights whose gradients both recordings have, or lists as 0."""
        first, second = given_of(self.first, 0), self._to_first(given_of(self.second, 0))
        for copy in self.second.copies[1:]:  # Copies of a pipeline have other weights.
            second = self._to_first(given_of(self.second, copy)) | second
        if not (first and second):
            return []
        listed = [{*step.trace.about.gradients} for step in (self.first, self.second)]
        return [
            pair.first
            for pair in self._matching.pairs
            if (pair.first in first or pair.first in second)
            and (pair.first in first or pair.first in listed[0])
            and (pair.first in second or pair.second in listed[1])
        ]

    def _to_first(self, named: Named) -> Named:
        return self._matching.to_first(named) if named else {}

    def _filled(self, own: Named) -> Named:
        return {
            name: self._dense(own[name]) if name in own else np.zeros(self._shapes[name])
            for name in self.names
        }

    def _dense(self, array: Array) -> np.ndarray:
        """Returns an array in float64; that of one object is made once, as kinds share arrays."""
        if id(array) not in self._known:
            self._known[id(array)] = array, dense(array)  # The object lives as long as its number.
        return self._known[id(array)][1]

    @functools.cached_property
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        arrays = self._to_first(given_of(self.second, 0)) | given_of(self.first, 0)
        for copy in self.second.copies[1:]:
            arrays = self._to_first(given_of(self.second, copy)) | arrays
        return {name: plain(array).shape for name, array in arrays.items()}

    # The way of a gradient.

    @functools.cached_property
    def reference(self) -> Named:
        """The gradient of the whole batch before clipping, in the reference."""
        return self._filled(given_of(self.first, 0)) if self.names else {}

    @functools.cached_property
    def reference_applied(self) -> Named:
        """The gradient that the reference applies."""
        return self._filled(self.first.applied(0)) if self.names else {}

    @functools.cached_property
    def given(self) -> list[Named]:
        """What enters clipping, or the optimizer, on each copy."""
        return self._of_copies([given_of(self.second, copy) for copy in self.second.copies])

    @functools.cached_property
    def applied(self) -> list[Named]:
        """What the optimizer of each copy applies."""
        return self._of_copies([self.second.applied(copy) for copy in self.second.copies])

    def _of_copies(self, copies: Sequence[Named]) -> list[Named]:
        """Returns arrays of each copy; those with the bits of copy 0 are converted once."""
        found: list[Named] = []
        for own in copies:
            if found and own.keys() == copies[0].keys():
                is_same = all(same_bits(own[name], copies[0][name]) for name in own)
                found.append(found[0] if is_same else self._filled(self._to_first(own)))
            else:
                found.append(self._filled(self._to_first(own)))
        return found

    @functools.cached_property
    def raw(self) -> list[Named]:
        """What each shard sends; empty if it is not recorded."""
        step = self.second
        if not step.has("raw"):
            return []
        sent = [self._to_first(own) for own in step.named("raw")]
        known = {name for own in sent for name in own}
        if any(np.any(self.given[0][name]) for name in self.names if name not in known):
            return []  # Of sharded weights, only what is reduced is recorded.
        return [self._filled(own) for own in sent]

    @functools.cached_property
    def backward_passes(self) -> list[list[Named]]:
        """What each backward pass of each shard adds, if a step has several."""
        return [
            [{name: dense(a) for name, a in self._to_first(own).items()} for own in passes]
            for passes in self._passes(self.second)
        ]

    @functools.cached_property
    def reference_backward_passes(self) -> list[Named]:
        """The same in the reference, of all shards."""
        return [own for passes in self._passes(self.first) for own in passes]

    @staticmethod
    def _passes(step: Step) -> list[list[Named]]:
        return [step.trace.backward_passes(step.position, shard) for shard in step.shards]

    @functools.cached_property
    def removed(self) -> list[Named]:
        """What the script took from the gradient of each shard between micro-batches."""
        return [self._to_first(own) for own in self._removed(self.second)]

    @functools.cached_property
    def reference_removed(self) -> Named:
        """The same in the reference."""
        return next(iter(self._removed(self.first)), {})

    @staticmethod
    def _removed(step: Step) -> list[Named]:
        return [step.trace.named(step.position, "removed", shard) or {} for shard in step.shards]

    @functools.cached_property
    def previous(self) -> "Gradients | None":
        """The gradients of the previous step; None if it was not recorded in both."""
        first, second = self.first.previous, self.second.previous
        return Gradients(first, second, self._matching) if first and second else None

    @functools.cached_property
    def weights(self) -> Named:
        """The weights before the step."""
        kinds, before = self.first.trace.kinds, self.first.named("before")[0]
        return {name: dense(a) for name, a in before.items() if kinds[name] == WEIGHT}

    # Numbers.

    @property
    def share(self) -> float:
        """The factor of what a shard sends in the sum, as the recording says; that of a mean else.

        A script may add by hand: which factor is right is solved with the reference's gradient.
        """
        is_known = len(self.second.shards) == 1 or self.second.trace.about.reduction
        return self.second.share(0) if is_known else 1 / len(self.second.shards)

    @functools.cached_property
    def divisor(self) -> float:
        """The number by which the reference divides gradients after the backward pass; 1 if none.

        A script may multiply its loss by it, against underflow, or add up sums over examples.
        """
        if len(self.first.shards) > 1 or not (self.first.has("raw") and self.reference):
            return 1.0
        raw = self._filled(self.first.named("raw")[0])
        factor = factor_of([*raw.values()], [*self.reference.values()])
        is_common = factor > 0 and not any(
            distance(raw[name], factor * own) > _SAME * factor * norm(own)
            for name, own in self.reference.items()
        )
        return factor if is_common and abs(factor - 1) > _SAME else 1.0

    @functools.cached_property
    def clipping(self) -> tuple[float, float]:
        """The factor by which the reference clips its gradient, and the norm that it leaves."""
        given, applied = self.reference, self.reference_applied
        squares = sum(norm(g) ** 2 for g in given.values())
        product = sum(float(np.sum(applied[name] * g)) for name, g in given.items())
        factor = product / squares if squares else 1.0
        return factor, factor * self.size

    @property
    def size(self) -> float:
        """The norm of the reference's gradient."""
        return self.norm_of(self.reference)

    def norm_of(self, gradients: Named) -> float:
        """Returns the norm of gradients, by the names of the reference, of all their elements.

        The norms of the reference are recorded. Of a sample, the vector of a gradient that has
        nearly the same direction is longer in the same proportion.
        """
        return total_norm({n: dense(g) * self._lengths.get(n, 1.0) for n, g in gradients.items()})

    @functools.cached_property
    def _lengths(self) -> dict[str, float]:
        """Weight → norm of the reference's gradient over that of its vector; 1 if it is whole."""
        arrays = given_of(self.first, 0) if self.names else {}
        lengths = {name: norm(dense(array)) for name, array in arrays.items()}
        return {
            name: norm(array) / lengths[name] if lengths[name] else 1.0
            for name, array in arrays.items()
            if isinstance(array, Sampled)
        }

    def elements(self, gradients: Named) -> Named:
        """Returns the known elements of gradients, without the sums of samples."""
        num_sums = self.first.trace.num_sums
        return {n: without_sums(g, num_sums(np.shape(g))) for n, g in gradients.items()}


def given_of(step: Step, copy: int) -> Named:
    """Returns what enters clipping, or the optimizer, on a copy; empty if it is unknown."""
    if not step.clips_sum:  # Each replica clips what it sends: what it computes enters.
        return _sum_of_raw(step)
    if own := step.entering(copy):
        return own
    for kind in ("sums", "clipped"):
        if step.has(kind):
            return step.named(kind)[copy]
    return step.applied(copy)


def _sum_of_raw(step: Step) -> Named:
    of_shards = step.named("raw") if step.has("raw") else []
    names = dict.fromkeys(name for own in of_shards for name in own)
    sums = {name: add([_wide(own[name]) for own in of_shards if name in own]) for name in names}
    return scaled_all(sums, step.share(0))


def _wide(gradient: Array) -> Array:
    """Returns a gradient in float64."""
    if not isinstance(gradient, Sampled):
        return dense(gradient)
    return Sampled(gradient.elements.astype(np.float64), gradient.sums, gradient.squares)


States = tuple[np.ndarray, np.ndarray]  # Before and after the step.


def joined_states(states: Sequence[States], shape: tuple[int, ...]) -> list[States]:
    """Returns whole states; parts that the copies hold are joined in their order.

    Args:
        states: for each copy, a variable before and after the step.
        shape: shape of the whole variable.

    Returns:
        For each copy its state, or the joined one; empty if they do not make up the whole.
    """
    if all(array.shape == shape for state in states for array in state):
        return list(states)
    own = states[0][1].shape
    axes = [
        axis for axis in range(len(shape)) if len(own) == len(shape) and own[axis] != shape[axis]
    ]
    if len(axes) != 1:
        return []
    old, new = (np.concatenate([state[i] for state in states], axes[0]) for i in (0, 1))
    return [(old, new)] * len(states) if old.shape == new.shape == shape else []


def has_batch_norms(step: Step) -> bool:
    """Returns whether layers normalise over examples of a batch, in training mode."""
    off = set.intersection(*(step.trace.in_evaluation(step.position, s) for s in step.shards))
    layers = [x for x in step.trace.about.layers if "batchnorm" in str(x.get("class")).lower()]
    return any(layer.get("name") not in off for layer in layers)
