"""One solver for all nodes: which sum of recorded terms is an array?

The Gram matrix of the terms is added over the tensors of a group and solved once, which *selects*
coefficients; a pass over the elements with a bound *confirms* them. Groups: all tensors, tensors
with equal coefficients, one tensor. Terms that are 0, or that others give, are not determined.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.engine.bounds import Bound
from lockstep.numeric.arrays import Named, dense, norm

# Eigenvalues of a Gram matrix of unit terms are known to 1e-16 times their number; below this, two
# terms are collinear to 1e-5, which rounding of float32 could have made.
DEPENDENT = 1e-10
# Part of a term in directions that others give, from which its coefficient has an error above 1e-3.
LOST = 1e-3
# Elements for each term, below which a tensor may confirm and not select.
FEWEST_ELEMENTS = 2
# Coefficients that are this close are one: float32 gives them to 1e-6, bfloat16 to 1e-3.
CLOSE = 1e-3
# Below this part of the largest coefficient, one is the rounding of a solution.
NOTHING = 1e-6


class Term(NamedTuple):
    """A recorded array of each weight, and what it is.

    Attributes:
        label: in formulas: "g0" for the gradient of rank 0.
        kind: "gradient", "pass", "right", "received", "copy", "weight", "sign",
            "change", "state" or "loss".
        rank: its rank, or -1.
        arrays: name → array.
        offset: 0, or -1 for the step before.
    """

    label: str
    kind: str
    rank: int
    arrays: Named
    offset: int = 0

    @property
    def is_weight(self) -> bool:
        """Whether it is the weight or its sign, as a regulariser adds them."""
        return self.kind in ("weight", "sign")


class Formula(NamedTuple):
    """Tensors, and the sum of terms that they are.

    Attributes:
        names: the tensors.
        terms: the terms.
        factors: their factors.
        known: whether the arrays determine each factor.
        copies: the copies whose tensors these are; empty for the reference's.
        operator: what acts on the terms or on the sum, as "rounded to bfloat16".
        words: what the tensors are where no terms say it, as "as before step 3".
    """

    names: tuple[str, ...]
    terms: tuple[Term, ...]
    factors: tuple[float, ...]
    known: tuple[bool, ...]
    copies: tuple[int, ...] = ()
    operator: str = ""
    words: str = ""

    @property
    def counted(self) -> list[tuple[float, Term]]:
        """The terms with their factors."""
        return [*zip(self.factors, self.terms, strict=True)]

    @property
    def has_earlier(self) -> bool:
        """Whether a gradient of the step before counts."""
        return any(abs(factor) > CLOSE for factor, term in self.counted if term.offset)

    def of(self, *kinds: str) -> np.ndarray:
        """Returns the factors of the terms of some kinds, of this step."""
        return np.array([f for f, t in self.counted if t.kind in kinds and not t.offset])

    @property
    def shares(self) -> np.ndarray:
        """The factors of what ranks or passes computed, or of the reference's gradient."""
        return self.of("gradient", "pass", "right", "received", "copy")

    @property
    def is_even(self) -> bool:
        """Whether all ranks count equally."""
        return is_constant(self.shares)

    @property
    def text(self) -> str:
        """The formula in words."""
        if self.words:
            return self.words
        shown = [f"{f:.5g}·{t.label}" for f, t in self.counted]
        return " + ".join(shown or ["0"]) + (f" ({self.operator})" if self.operator else "")


def is_constant(values: np.ndarray) -> bool:
    """Returns whether all of some numbers are one."""
    return bool(len(values) == 0 or np.ptp(values) <= CLOSE * np.max(np.abs(values)))


def is_one_of(values: np.ndarray, wanted: Sequence[float]) -> bool:
    """Returns whether all values are one of some numbers."""
    if not len(values):
        return False
    return any(np.all(np.abs(values - each) <= CLOSE * abs(each)) for each in wanted)


def solve(
    observed: Named, terms: Sequence[Named], names: Sequence[str]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coefficients of the terms, and which of them the arrays determine."""
    num, num_elements = len(terms), 0
    gram, right = np.zeros((num, num)), np.zeros(num)
    for name in names:
        flat = dense(observed[name]).ravel()
        rows = [dense(t[name]).ravel() if name in t else np.zeros(flat.size) for t in terms]
        columns = np.stack(rows) if rows else np.zeros((0, flat.size))
        if not (np.isfinite(columns).all() and np.isfinite(flat).all()):
            return np.full(num, np.nan), np.zeros(num, bool)
        gram += columns @ columns.T
        right += columns @ flat
        num_elements += int(np.count_nonzero(np.any(columns != 0, axis=0)))
    scale = np.sqrt(np.diag(gram))
    used = scale > 0
    if not used.any():
        return np.zeros(num), np.zeros(num, bool)
    scale = np.where(used, scale, 1.0)
    values, vectors = np.linalg.eigh(gram / scale[:, None] / scale)
    kept = values > DEPENDENT
    of_unit = vectors[:, kept] @ ((vectors[:, kept].T @ (right / scale)) / values[kept])
    lost = np.abs(vectors[:, ~kept]).max(axis=1) if (~kept).any() else np.zeros(num)
    is_enough = num_elements >= FEWEST_ELEMENTS * num
    return np.where(used, of_unit / scale, 0.0), (lost < LOST) & used & is_enough


def formulas(
    observed: Named, names: Sequence[str], terms: Sequence[Term], bound: Bound,
    usual: Sequence[Sequence[float]] = (),
) -> tuple[list[Formula], list[str]]:  # fmt: skip
    """Returns the formulas of some tensors, and the names of those that have none.

    One for all if it fits; else one for those that a first one explains, and so on. Of terms that
    do not determine their factors, as of a tensor with one element, the first of some usual ones
    that fits is taken.
    """
    whole = _fitted(observed, names, terms, bound, usual)
    if whole:
        return [whole], []
    singles = [each for name in names if (each := _fitted(observed, [name], terms, bound, usual))]
    singles.sort(key=lambda each: (-sum(each.known), -norm(observed[each.names[0]])))
    found, left = list[Formula](), list(names)
    while singles:
        first = singles[0]
        alike = [x.names[0] for x in singles if _fits(observed, x.names[0], first, bound)]
        alike = alike or [*first.names]
        found.append(first._replace(names=tuple(alike)))
        singles = [x for x in singles if x.names[0] not in alike]
        left = [name for name in left if name not in alike]
    return found, left


def _fitted(
    observed: Named, names: Sequence[str], terms: Sequence[Term], bound: Bound,
    usual: Sequence[Sequence[float]],
) -> Formula | None:  # fmt: skip
    """Returns the formula of tensors; None if it does not fit all of them."""
    factors, known = solve(observed, [term.arrays for term in terms], names)
    if not names or not np.isfinite(factors).all():
        return None
    least = NOTHING * np.max(np.abs(factors), initial=0)
    factors = np.where(np.abs(factors) <= least, 0, factors)
    found = Formula(tuple(names), tuple(terms), tuple(map(float, factors)), tuple(map(bool, known)))
    for each in usual if not all(known) else ():
        own = found._replace(factors=tuple(map(float, each)))
        if all(_fits(observed, name, own, bound) for name in names):
            return own
    return found if all(_fits(observed, name, found, bound) for name in names) else None


def _fits(observed: Named, name: str, formula: Formula, bound: Bound) -> bool:
    expression = [(f, t.arrays) for f, t in formula.counted]
    return bool(bound(observed, expression, [name]).get(name, np.inf) <= 1)


# --- Operators ------------------------------------------------------------------------------------


def rounded(array: np.ndarray, dtype: str) -> np.ndarray:
    """Returns an array rounded to float16 or bfloat16."""
    if dtype == "float16":
        return np.asarray(array, np.float16).astype(np.float64)
    words = np.ascontiguousarray(array, np.float32).view(np.uint32)
    nearest = (words + 0x7FFF + ((words >> 16) & 1)) & np.uint32(0xFFFF0000)
    return nearest.view(np.float32).astype(np.float64)


def short_dtypes() -> Iterator[tuple[str, Callable[[np.ndarray], np.ndarray]]]:
    """Yields the dtypes of 16 bits with what rounds to them."""
    for dtype in ("bfloat16", "float16"):
        yield dtype, functools.partial(rounded, dtype=dtype)


def clipped(gradients: Named, limit: float) -> Named:
    """Returns gradients clipped to a norm."""
    size = sum(norm(own) ** 2 for own in gradients.values()) ** 0.5
    return {name: own * min(1.0, limit / size) if size else own for name, own in gradients.items()}
