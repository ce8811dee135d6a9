"""What may be added to explain a sum: what the copies are given, and what the shards sent."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.context import Context
from lockstep.explain.rows import Meaning, share_of
from lockstep.numeric.arrays import (
    EPS,
    UNITS,
    Named,
    Rows,
    add,
    blocks,
    dense,
    plain,
    same_bits,
    scaled,
    sum_bound,
    unit_of,
    wide,
)
from lockstep.numeric.sampling import with_sums
from lockstep.numeric.tolerance import Expression

_OF_NORM = 64  # Units of rounding of the norm by which a script clips.
_FAR_OFF = 4  # Times its bound; twice the bound is still compared.
_OF_ROWS = 4  # Units of rounding of the sum of rows of a sparse gradient, in another order.


@dataclasses.dataclass
class Sums:
    """The gradients that the copies are given, and those that the shards sent.

    Attributes:
        context: the step.
        received: for each copy, the gradients that it is given.
        factors: for each shard, the factor of its gradient in the right sum.
        means: says what a common factor of all gradients means; None if nothing is known.
        is_clipped: whether the factors contain that of a clipping whose norm was rounded.
        slack: name of a weight → how far rounding may move each element of what is received, in
            addition.
    """

    context: Context
    received: Sequence[Named]
    factors: Any  # Becomes an array.
    means: Callable[[float], Sequence[Meaning]] | None = None
    is_clipped: bool = False
    slack: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.factors = np.asarray(self.factors, np.float64)
        self._units: dict[str, float] = {}

    @functools.cached_property
    def kinds(self) -> dict[str, np.ndarray]:
        """Name of a weight → a gradient of its shape and dtype."""
        return {name: plain(array) for own in self.received for name, array in own.items()}

    @functools.cached_property
    def sent(self) -> list[Named]:
        """For each shard, what it sent; 0 where it has no gradient."""
        return [
            {name: own.get(name, np.zeros_like(like)) for name, like in self.kinds.items()}
            for own in self.context.named(self.context.kind_sent)
        ]

    @property
    def num(self) -> int:
        """The number of shards."""
        return len(self.sent)

    def right(self, name: str) -> np.ndarray:
        """Returns the right sum of a weight, in the dtype of its gradients if it is a mean."""
        own = [sent[name] for sent in self.sent]
        if np.ptp(self.factors):
            return np.sum([f * dense(g) for f, g in zip(self.factors, own, strict=True)], axis=0)
        total = add(own)
        return total if self.factors[0] == 1 else scaled(total, float(self.factors[0]))

    def of(self, factors: Sequence[float] | np.ndarray) -> Expression:
        """Returns the sum of what was sent with other factors."""
        return list(zip(map(float, factors), self.sent, strict=True))

    @functools.cached_property
    def common(self) -> set[str]:
        """The weights of which all copies are given the same gradient."""
        first, *others = self.received
        return {
            name
            for name in first
            if all(name in own and same_bits(own[name], first[name]) for own in others)
        }

    def shares(
        self, observed: Named, expression: Expression, names: Sequence[str] | None = None, *,
        of_largest: bool = False,
    ) -> dict[str, float]:  # fmt: skip
        """Returns name → largest distance of an element from an expression, over its bound.

        Only recorded arrays are added: each element has the rounding of its own sum, in the dtype
        of these arrays and of the reduction.
        """
        found = {}
        for name in observed if names is None else names:
            terms = [(factor, wide(term[name])) for factor, term in expression if name in term]
            actual = wide(observed[name])
            is_of_elements = not of_largest and self._is_of_elements(name)
            if is_of_elements and all(term.shape == actual.shape for _, term in terms):
                found[name] = self._share_by_blocks(name, actual, terms)
                continue
            parts = [factor * dense(term) for factor, term in terms] or [np.zeros(actual.shape)]
            value = np.sum(parts, axis=0)
            bound = self.bound(name, parts) if value.shape == actual.shape else 0.0
            found[name] = share_of(actual, value, np.max(bound, initial=0) if of_largest else bound)
        return found

    def _is_of_elements(self, name: str) -> bool:
        """Returns whether the bound of an element depends on this element of what is added only."""
        has_rows = any(isinstance(sent[name], Rows) for sent in self.sent)
        is_sampled = self.context.trace.num_sums(np.shape(self.kinds[name]))
        return not (has_rows or is_sampled or name in self.slack or self.context.trace.model_axes)

    def _share_by_blocks(
        self, name: str, actual: np.ndarray, terms: Sequence[tuple[float, np.ndarray]]
    ) -> float:
        """Returns the largest share of an element; of one that is far off, that of its block."""
        found = 0.0
        for own, *others in blocks(actual, *(term for _, term in terms)):
            parts = [factor * part for (factor, _), part in zip(terms, others, strict=True)]
            parts = parts or [np.zeros(own.shape)]
            bound = self._of_elements(parts, self._unit(name))
            found = max(found, share_of(own, np.sum(parts, axis=0), bound))
            if found > _FAR_OFF:
                break
        return found

    def _unit(self, name: str) -> float:
        """Returns the unit of rounding of a sum."""
        if name not in self._units:
            context = self.context
            unit = UNITS.get(context.trace.about.reduced_in, EPS)
            own = [unit_of(sent[name]) for sent in self.sent if np.any(plain(sent[name]))]
            unit = max(unit, min(own, default=EPS))  # Of 16-bit weights.
            if context.computes:
                unit = max(unit, context.oracle.units.get(name, EPS))
            self._units[name] = unit
        return self._units[name]

    def _of_elements(self, parts: Sequence[np.ndarray], unit: float) -> np.ndarray:
        bound = sum_bound(parts, unit)
        if self.is_clipped:
            bound = bound + _OF_NORM * unit * np.abs(np.sum(parts, axis=0))
        return bound

    def bound(self, name: str, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the bound of each element's error in a sum."""
        context, unit = self.context, self._unit(name)
        bound, axes = self._of_elements(parts, unit), context.trace.model_axes
        for factor, sent in zip(self.factors, self.sent, strict=True):
            if isinstance(
                own_rows := sent[name], Rows
            ):  # Rows that occur several times may cancel.
                size = own_rows._replace(values=np.abs(own_rows.values)).dense()
                bound = bound + _OF_ROWS * unit * abs(factor) * size
        bound = bound + self.slack.get(name, 0.0)
        bound = with_sums(bound, context.trace.num_sums(bound.shape))
        if axes:  # Each part is a sum over ranks, whose terms may cancel.
            bound = np.full_like(bound, math.prod(axes.values()) * np.max(bound, initial=0))
        return bound

    @property
    def senders(self) -> str:
        """What sends the gradients, in words."""
        is_split = self.num > self.context.trace.about.num_replicas
        return f"{self.num} {'micro-batches' if is_split else 'replicas'}"

    @functools.cached_property
    def previous(self) -> list[Named]:
        """What the shards sent in the previous step; empty if it is unknown."""
        before, kind = self.context.previous, self.context.kind_sent
        return before.named(kind) if before and before.has(kind) else []

    @functools.cached_property
    def loss_scales(self) -> np.ndarray:
        """The loss scale of each shard."""
        context = self.context
        return np.array([context.trace.loss_scale(context.position, s) for s in context.shards])
