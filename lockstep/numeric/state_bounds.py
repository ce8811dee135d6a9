"""Returns how far rounding can move what a training step does to its state.

Two correct trainings start a step from the same state S and compute S'; their changes D1 and D2
differ by the following, for each element. u is the unit of the array's dtype, that of bfloat16 if
its bits are those of bfloat16 in the reference.

- The state is stored: S' is rounded once, and an update has a few further operations on numbers of
  its size: `STORED` · u · max(|S| + |S'|).
- The change comes from a gradient whose elements differ by a relative ρ, by rules that divide
  by roots and means of gradients: `COMPUTED` · max(u, ρ) · max(|D1|, |D2|). ρ counts only if this
  weight's gradient agrees within its own bound: with that of a wrong gradient, every wrong update
  would agree. An element whose ρ is above `MOST_KNOWN` is one of rounding alone, and is not
  compared. A rule that adds the decay of the weight to the gradient uses their sum, of which ρ is
  a part: where both nearly cancel, it is many times that of the gradient.
- The gradient may cancel the momentum: the change is smaller than its terms, and a difference of
  the gradient in the last place (ρ <= u) is a large part of it. `COMPUTED` · ρ · the root mean
  square of D1 for weights, · (|S| + |S'|) for state, if that is more. In 31 M weights under AdamW,
  one change in 300 of the usual size was 4 times the bound without it.
- An optimizer without a known rule may mix the elements of a weight, as Muon does: `COMPUTED` ·
  max(u, relative distance of the gradients) · the root mean square of D1, in addition.
- Muon's five iterations enlarge by 3.4445⁵ = 485 a direction of which the gradient has rounding
  alone, as that over all classes of a classifier, and its largest element is some three times the
  usual one: `ENLARGED` in place of `COMPUTED`. Where that is more than `MOST_ENLARGED`, as in 16
  bits, the change is not compared.
- State that keeps what a weight of 16 bits loses, as Kahan's compensation, is a small difference of
  the weight's change: `COMPUTED` · `EPS` · that change in addition, without a known rule.
- Adam outside of PyTorch corrects its bias with 1 − β^t in float32, which loses digits while t is
  small: `correction_error` · |D1| in addition.

Measured on 109 correct PyTorch programs of `cases/programs`, the largest difference is
0.31 of the bound in float32 (of optimizer state 0.15, of statistics 0.003), 0.04 in float16, and
0.87 of weights that are kept in bfloat16.
"""

from collections.abc import Callable, Iterable

import numpy as np

from lockstep.numeric.arrays import (
    EPS,
    TINY,
    Array,
    by_blocks,
    distance,
    elements_of,
    norm,
    ratio,
    unit_of,
)

STORED, COMPUTED, ENLARGED = 8, 64, 1536
MOST_ENLARGED = 0.25  # Of the root mean square of a change.
MOST_KNOWN = 1e-3
_UNKNOWN_GRADIENT = 4 * EPS  # Of gradients that are not recorded, or are reduced later.
_DENSITY = 12  # Of gradients near 0; that of a normal distribution is 0.8.
OfElements = Callable[..., np.ndarray]  # Arrays of some elements → an array of them.
_FEW = 16  # Elements that tell the dtype in which they were kept.


def mean_square(array: Array) -> float:
    """Returns the root mean square of an array's elements."""
    return norm(array) / max(np.size(array), 1) ** 0.5


def unit_of_state(*arrays: Array) -> float:
    """Returns the largest unit of some arrays; float32's for those that are too small to tell."""
    large = (array for array in map(elements_of, arrays) if array.size >= _FEW and np.any(array))
    return max([EPS, *map(unit_of, large)])


def spread_of(
    first: Array | None, second: Array | None, allowed: float, decay: np.ndarray | float = 0.0
) -> np.ndarray:
    """Returns ρ for each element of a gradient: infinite where it is rounding alone.

    Args:
        first, second: the gradient in the reference and in the training; None if unknown.
        allowed: its relative difference that rounding can cause; 0 if the gradients do not agree.
        decay: what the rule adds to the gradient before it uses it.
    """
    if first is None or second is None:
        return np.zeros(())
    return by_blocks(spread_by_element(first, allowed), first, second, decay)


def spread_by_element(first: Array, allowed: float) -> OfElements:
    """Returns what computes ρ of some elements of both gradients, and of their decay."""
    usual, most = 4 * _UNKNOWN_GRADIENT * mean_square(first), max(MOST_KNOWN, 4 * allowed)

    def of_elements(own: np.ndarray, other: np.ndarray, decay: np.ndarray) -> np.ndarray:
        gap = np.abs(other - own) if allowed else usual
        with np.errstate(divide="ignore", invalid="ignore"):
            spread = gap / np.minimum(np.abs(own), np.abs(own + decay))
        spread = np.where(gap == 0, 0.0, spread) if allowed else spread
        return np.where(spread <= most, spread, np.inf)

    return of_elements


def spread_of_sums(of_elements: np.ndarray, apart: float) -> float:
    """Returns ρ of the sums of a weight whose update is not linear in its gradient, as Adam's.

    The update of an element turns over where its gradient is rounding alone. Of a gradient whose
    elements have a density p of nearly 0, in units of their root mean square, and that differs by a
    relative ρ, the updates then differ by √(8 p ρ) of their norm; p is at most `_DENSITY`.

    Args:
        of_elements: ρ of some elements; infinite where the gradient is rounding alone.
        apart: relative distance of the gradients.
    """
    if not apart <= MOST_KNOWN:
        return np.inf
    num_unknown = float(np.mean(~np.isfinite(of_elements)))
    return (8 * num_unknown + 8 * _DENSITY * max(apart, EPS)) ** 0.5 / COMPUTED


def distance_of_gradients(first: Array | None, second: Array | None, allowed: float) -> float:
    """Returns the relative distance of two gradients that agree; that of rounding for others."""
    if first is None or second is None or not allowed:
        return _UNKNOWN_GRADIENT
    return ratio(distance(second, first), norm(first))


def of_directions(apart: float, unit: float) -> float:
    """Returns `mixes` of an update that enlarges directions, as Muon's; infinite if unknown.

    Args:
        apart: relative distance of the gradients.
        unit: u.
    """
    enlarged = ENLARGED * max(unit, apart)
    return enlarged / COMPUTED if enlarged <= MOST_ENLARGED else np.inf


def change_by_element(usual: float, unit: float, mixes: float, *, is_weight: bool) -> OfElements:
    """Returns what computes the bound of some elements, from D1, D2, |S| + |S'| and ρ.

    It is infinite where it is not known.

    Args:
        usual: the root mean square of D1.
        unit: u.
        mixes: relative distance of the gradients, if the update may mix elements; else 0.
        is_weight: whether it is a weight, not its state.
    """
    of_mixed = COMPUTED * max(unit, mixes) * usual if mixes and usual else 0.0

    def of_elements(
        first: np.ndarray, second: np.ndarray, size: np.ndarray, spread: np.ndarray
    ) -> np.ndarray:
        terms = np.maximum(np.abs(first), np.abs(second))
        least = usual if is_weight else size
        with np.errstate(invalid="ignore"):
            computed = COMPUTED * np.maximum(np.maximum(unit, spread) * terms, spread * least)
        computed = np.where(np.isfinite(spread), computed, np.inf)
        return STORED * unit * size + computed + TINY + of_mixed

    return of_elements


def correction_error(betas: Iterable[float], number: int) -> float:
    """Returns the relative rounding error of 1 − β^t in float32, for t = `number`, of two runs."""
    return max((4 * EPS / max(1 - beta**number, 1e-6) for beta in betas), default=0.0)


def of_statistics(size: np.ndarray, allowed: float, least: float = 0.0) -> np.ndarray:
    """Returns the bound of statistics, whose elements are sums over a batch that may cancel.

    Args:
        size: |S| + |S'|.
        allowed: relative difference of a statistic of a batch that rounding can cause.
        least: the root mean square of all elements, if `size` has some of them.
    """
    usual = max(mean_square(size), least)
    return np.full(size.shape, max(allowed, COMPUTED * EPS) * usual + TINY)


def of_start(first: np.ndarray, size: np.ndarray, spread: np.ndarray) -> np.ndarray:
    """Returns the bound of a change between two steps: 0 where the reference changes no bit.

    Args:
        first: the change between the steps in the reference.
        size: |S| at the end of the step.
        spread: ρ of the gradient in the step before, which code after the step may use.
    """
    if not np.any(first):
        return np.zeros(first.shape)
    largest = np.max(size, initial=0.0)
    with np.errstate(invalid="ignore"):
        by_gradient = np.where(np.isfinite(spread), spread * np.abs(first), np.inf)
    return COMPUTED * EPS * (size + np.abs(first) + largest) + COMPUTED * by_gradient + TINY
