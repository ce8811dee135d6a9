"""How far rounding can move the gradients of a training: every bound, with its derivation.

Two correct trainings compute a gradient from the same state and examples in other orders: another
split of the batch, other kernels. With coefficients c and terms t, of which it is to be the sum,
the 2-norm of the difference is bounded, for each tensor, by

    K · u · (‖Σ |c||t|‖ + that of the largest tensor) + 8 · max |c| · spread

- u is the unit of the *reference's* arithmetic: of its autocast dtype, or of its weights if these
  are kept in 16 bits, else of float32. With the coarser unit of both, a training that computes in
  16 bits would pass.
- The terms are what the shards send, where they are recorded: a sum of which much cancels has the
  errors of its parts.
- The largest tensor is there for gradients that are 0 but for rounding, such as that of a bias
  before a softmax: what was summed to them is of the size of other gradients. BatchNorm subtracts
  means from all of n numbers, whose sum is 0 then; the errors of these means point in one
  direction, and add up to n of them, over a standard deviation that may be small. A gradient
  counts as 0 in float32 if both are below `ZERO` units of the largest tensor.
- The spread is the distance of the reference's gradient from itself with permuted examples, as part
  of the largest tensor: a ReLU or a maximum near a tie turns over with the last bits. It is 8 times
  that of a few permutations, and at most `MOST_BY_ROUNDING` of the tensor, or 8 u if that is more
  (6 % in bfloat16): a larger one is a fault that the permuted recording also has.
- K is `WITH_SPREAD` beside a spread. Without one, it is √n / `OF_ROOT`, at least `WITH_SPREAD`: the
  errors of a sum of n numbers grow like a random walk, and n is at most the number of inputs of a
  batch. It is at least `WITHOUT_SPREAD` between two frameworks, whose kernels add pixels and
  channels in other orders, behind a BatchNorm, which divides small numbers by small ones, and where
  no inputs are recorded.
- In 16 bits, sums over examples are accumulated in float32, so that a permutation moves nothing; K
  is `IN_16_BITS`, twice that behind a BatchNorm. A gradient that a permutation moves by more, as on
  processors that accumulate in 16 bits, has its spread. Of the largest tensor, `OF_LARGEST` counts
  where no BatchNorm makes gradients that are rounding alone.
- Ranks of a model round each part of an activation, and of its gradient, to 16 bits before the
  parts are added, in each layer anew: K is `IN_16_BITS`·√m on m weights, as in a random walk. How
  much a step enlarges such differences shows in its outputs: where these are more than u apart, K
  is as many times larger. (The forward pass has its own bound of outputs.)
- A GPU may round float32 to TF32 in products, and chooses so by the size of a batch: K is `IN_TF32`
  units of TF32. No permutation shows it, as batches have equal sizes.
- Where a BatchNorm, or on a GPU the kernel for another size of a batch, adds in another order, the
  outputs of the same examples differ in their last bits, and units whose inputs are nearly 0 turn
  over, each with its part of the gradient: `TIES` of the tensor is allowed behind a BatchNorm, else
  `TIES_ALONE`, in a direction of its own. What is along the gradient, as a factor is, has the tight
  bound: the difference may have a cosine of `ALONG` to a tensor of `MANY` elements, `NEARLY_ALONG`
  to a smaller one, and any to one of less than `FEW`.

Measured (residual over u · (size + largest)) with batches of 16 to 2,048: MLP 0.25 to 1.0,
convolutions with GroupNorm 3.1 to 39, transformer of 8 layers 0.8 to 11; beside a spread nothing,
with BatchNorm and a smooth function at most 1.5; in bfloat16 0.12 to 0.43, the bias after attention
in Keras on a CPU, which adds 105 terms in bfloat16, 1.9.
With tensor parallelism in bfloat16, 8 seeds: 2.0 of 1 layer, 2.4 of 2, 3.2 of 4, 12 of 8 (7.2 times
the distance of the outputs).
Behind BatchNorm and ReLU, ties move gradients by up to 3.5e-3 of their size. On an H200, batches of
16 to 1,024: float32 at most 3.5, with ties 3.1e-4 of a tensor; bfloat16 0.38; TF32 6.7.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.numeric.arrays import (
    EPS,
    MARGIN,
    TINY,
    Array,
    Named,
    are_finite,
    blocks,
    dense,
    length,
    norm_in,
    ratio,
    stored,
    wide,
)

WITH_SPREAD, WITHOUT_SPREAD, IN_16_BITS, IN_TF32 = 8.0, 64.0, 1.0, 16.0
OF_ROOT = 4.0
ZERO = 256.0
OF_LARGEST = 0.02
TIES, TIES_ALONE = 1e-2, 1e-3
ALONG, NEARLY_ALONG = 0.5, 0.95
MANY, FEW = 64, 4
MOST_BY_ROUNDING = 1e-2
SMALL_PART = 1e-2  # Of the largest tensor; the spread of a smaller one may be larger than it is.
KERNELS = 64 * EPS  # Relative difference of correct kernels of two frameworks.

Expression = Sequence[tuple[float, Named]]  # Coefficients and terms of a sum.


def value_of(expression: Expression, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Returns an expression's value for one tensor; terms without it are 0."""
    total = np.zeros(shape)
    for factor, term in expression:
        if factor and name in term:
            total = total + factor * dense(term[name])
    return total


def size_of(expression: Expression, name: str) -> float:
    """Returns ‖Σ |c||t|‖ for one tensor: rounding is relative to each term, as it does not cancel.

    An upper bound that needs no array: the sum of the norms, of finite elements, as one that
    overflows must not widen a bound; of a sample that of its vector.
    """
    return sum(abs(factor) * norm_in(term, name) for factor, term in expression if name in term)


def error_of_sum(number: int) -> float:
    """Returns the units of rounding in a sum of so many numbers: they grow like a random walk."""
    return float(number**0.5 / OF_ROOT)


class Gap(NamedTuple):
    """The difference of an array from the value of an expression.

    Attributes:
        length: its norm.
        actual, value: norms of the array and of the value.
        product: its scalar product with the value.
        num: number of elements.
    """

    length: float
    actual: float
    value: float
    product: float
    num: int


def gap_of(actual: Array, terms: Sequence[tuple[float, Array]]) -> Gap | None:
    """Returns the difference from a sum of terms; None for other shapes, or where one overflows.

    Elements that are not finite in both, as in a step that is skipped, are left out.
    """
    actual, terms = wide(actual), [(factor, wide(term)) for factor, term in terms if factor]
    if any(np.shape(term) != np.shape(actual) for _, term in terms):
        return None
    sums, num = np.zeros(4), 0
    for own, *parts in blocks(actual, *(term for _, term in terms)):
        value = np.zeros(own.shape)
        for (factor, _), part in zip(terms, parts, strict=True):
            value += factor * part
        finite = np.isfinite(own)
        if np.any(finite != np.isfinite(value)):
            return None
        num += own.size
        if not finite.all():
            own, value = own[finite], value[finite]
        gap = own - value
        products = (gap, gap), (own, own), (value, value), (gap, value)
        sums += [float(np.sum(a * b)) for a, b in products]
    apart, own_size, size = np.sqrt(sums[:3]).tolist()
    return Gap(apart, own_size, size, float(sums[3]), num)


def share_of_ties(gap: Gap, far: float, along: float) -> float:
    """Returns the distance of an array from its value over what units that turn over can cause.

    Args:
        gap: the difference.
        far: the largest distance.
        along: the largest distance in the direction of the value, as of a factor.
    """
    own = abs(gap.product) / max(gap.value, TINY)
    return max(gap.length / max(far, TINY), own / max(along * (1 + EPS), TINY))


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """The bound of gradients of one reference; see above.

    Attributes:
        text: how it was computed, and what it misses.
        times: K.
        unit: u.
        spread: name of a weight in the reference → spread, as part of the largest tensor.
        given: relative difference that a user allows, in place of all others; 0 without it.
        ties: part of a tensor that units which turn over may change.
        of_largest: part of the largest tensor that counts.
        zero: units of the largest tensor below which a gradient counts as 0.
        summed: name of a weight in the reference → Σ |c|‖t‖ of what the shards send.
        moved: returns how far permuted examples move the change of a variable of the reference, as
            part of that change.
    """

    text: str = ""
    times: float = WITHOUT_SPREAD
    unit: float = EPS
    spread: Mapping[str, float] = dataclasses.field(default_factory=dict)
    given: float = 0.0
    ties: float = 0.0
    of_largest: float = 1.0
    zero: float = 0.0
    summed: Mapping[str, float] = dataclasses.field(default_factory=dict)
    moved: Callable[[str], float] = lambda name: 0.0

    def shares(
        self, observed: Named, expression: Expression, names: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Returns name → distance of an array from an expression, over its bound.

        Args:
            observed: the arrays.
            expression: what they are to be; names that no term has are left out.
            names: the arrays to compare; None for all.
        """
        chosen = observed if names is None else names
        known = {n: None for n in chosen if any(n in term for _, term in expression)}
        sizes = {name: size_of(expression, name) for name in known}
        most = max((abs(factor) for factor, _ in expression), default=0.0)
        largest = max(sizes.values(), default=0.0)
        found = {}
        for name, size in sizes.items():
            terms = [(factor, stored(term, name)) for factor, term in expression if name in term]
            gap = gap_of(stored(observed, name), terms)
            if gap is None:
                found[name] = np.inf
                continue
            summed = max(size, self.summed.get(name, 0.0))
            found[name] = gap.length / self._allowed(name, summed, largest, most)
            if self.zero:
                least = self.zero * self.unit * largest + TINY
                found[name] = min(found[name], max(gap.actual, gap.value) / least)
            if size and self.ties:
                part = ALONG if gap.num >= MANY else NEARLY_ALONG
                part = 1.0 if gap.num < FEW else part
                of_ties = share_of_ties(gap, self.ties * size, part * gap.length)
                found[name] = min(found[name], of_ties)
        return found

    def _allowed(self, name: str, size: float, largest: float, most: float) -> float:
        if self.given:
            return self.given * max(size, SMALL_PART * largest) + TINY
        by_order = MARGIN * self.spread.get(name, 0.0) * max(most, 1.0) * largest
        by_order = min(by_order, self._most_by_order * max(size, SMALL_PART * largest))
        return self.times * self.unit * (size + self.of_largest * largest) + by_order + TINY

    def fits(
        self, observed: Named, expression: Expression, names: Sequence[str] | None = None
    ) -> bool:
        """Returns whether all arrays are an expression, within rounding."""
        return max(self.shares(observed, expression, names).values(), default=0.0) <= 1

    def wrong(self, observed: Named, *terms: Named) -> dict[str, float]:
        """Returns name → relative distance of the arrays that are not the sum of some terms."""
        expression = [(1.0, term) for term in terms]
        sizes = {name: size_of(expression, name) for name in observed}
        least = max(SMALL_PART * max(sizes.values(), default=0.0), TINY)
        found = {}
        for name, share in self.shares(observed, expression).items():
            if not share <= 1:
                actual = dense(observed[name])
                value = value_of(expression, name, actual.shape)
                far = length(actual - value) if are_finite([actual, value]) else np.inf
                found[name] = ratio(far, max(sizes[name], least))
        return found

    def allowed(self, names: Sequence[str]) -> float:
        """Returns the largest relative difference that rounding can cause in large tensors."""
        spreads = [MARGIN * self.spread.get(name, 0.0) for name in names]
        own = self._of_units + min(max(spreads, default=0.0), self._most_by_order)
        return self.given or own + self.ties

    @property
    def usual(self) -> float:
        """The relative difference of an ordinary gradient that rounding can cause."""
        spreads = sorted(self.spread.values())
        middle = MARGIN * spreads[len(spreads) // 2] if spreads else 0.0
        return self.given or self._of_units + min(middle, self._most_by_order)

    @property
    def _most_by_order(self) -> float:
        """The relative difference that another order can cause: more, where sums have 16 bits."""
        return max(MOST_BY_ROUNDING, MARGIN * self.unit)

    @property
    def _of_units(self) -> float:
        """The relative difference of the largest tensor by units of rounding."""
        return (1 + self.of_largest) * self.times * self.unit

    def of_inputs(self, number: int, *, least: float) -> "Tolerance":
        """Returns the bound of a batch with so many numbers as inputs, where there is no spread."""
        if self.given or self.spread or self.unit > EPS or not number:
            return self
        return dataclasses.replace(self, times=max(least, error_of_sum(number)))

    @property
    def of_batch(self) -> float:
        """The relative difference of a loss, or of the statistics of a batch."""
        return max(self.usual, KERNELS)
