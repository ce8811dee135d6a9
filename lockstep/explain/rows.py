"""Rows: expressions that may explain wrong arrays, as data, and the choice among them."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from lockstep.explain.solve import is_large
from lockstep.numeric.arrays import Array, Named, blocks, dense, wide
from lockstep.numeric.tolerance import Expression


class Meaning(NamedTuple):
    """What coefficients mean: the detail of a cause, with a reason in words."""

    detail: str
    reason: str


class Bound(Protocol):
    """How far rounding can move arrays: `Tolerance`, that of a sum, of an oracle, of an update."""

    def shares(
        self, observed: Named, expression: Expression, names: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Returns name → distance of an array from an expression, over its bound."""


def share_of(actual: Array, value: Array, bound: Any) -> float:
    """Returns the largest distance of two elements, over its bound; infinite for other shapes."""
    whole = wide(actual), wide(value)
    if whole[0].shape != whole[1].shape:
        return float(np.inf)
    found = 0.0
    for a, e, allowed in blocks(*whole, np.broadcast_to(bound, whole[0].shape)):
        with np.errstate(invalid="ignore"):
            far = np.where(~np.isfinite(a) & ~np.isfinite(e), 0.0, np.abs(a - e) / allowed)
        found = max(found, float(np.max(np.where(np.isnan(far), np.inf, far), initial=0.0)))
    return found


class Row(NamedTuple):
    """An expression that may explain arrays, and what it means.

    Attributes:
        detail: the exact name, a key of `causes.DETAILS`.
        text: one sentence with the numbers.
        expression: coefficients and terms; or computes them, as a reference that can be asked for
            another variant does.
        items: numbers of the shards that it names; empty for all.
        factors: of a row of what shards send, the coefficients with which their gradients give
            that of the whole batch; empty where the terms are others.
        bound: a bound of its own; None for that of the arrays.
    """

    detail: str
    text: str
    expression: Expression | Callable[[], Expression]
    items: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    bound: Bound | None = None

    @property
    def terms(self) -> Expression:
        """The expression; it may be computed."""
        return self.expression() if callable(self.expression) else self.expression


def computed(
    detail: str, text: str, predict: Callable[..., Named], *args: Any, **changes: Any
) -> Row:
    """Returns the row of arrays that a function computes when they are needed."""
    return Row(detail, text, lambda: [(1.0, predict(*args, **changes))])


class Choice(NamedTuple):
    """A row, the arrays that it explains, and other rows that explain them as well."""

    row: Row
    names: tuple[str, ...]
    may_be: tuple[str, ...] = ()


def choose(
    observed: Named, wrong: Sequence[str], rows: Iterable[Row], bound: Bound, num_terms: int = 0,
    right: Named | None = None,
) -> tuple[list[Choice], list[str]]:  # fmt: skip
    """Returns the rows that explain wrong arrays, and the names of those that none explains.

    A row that explains more of them comes first; of equal ones the first in order, the most
    specific. An array with few elements joins a row that larger ones show, and selects none.
    Nothing is computed after rows that explain all of them.

    Args:
        observed: the arrays.
        wrong: names of those that are not right.
        rows: the rows, the most specific first.
        bound: the bound of the arrays.
        num_terms: the largest number of solved coefficients of a row.
        right: the right arrays, which a row does not explain; None if rows have tried it.
    """
    fitting, explained = list[tuple[Row, list[str]]](), set[str]()
    for row in rows if wrong else ():
        if callable(row.expression) and len(explained) == len({*wrong}):
            break
        terms, own = row.terms, row.bound or bound
        shares = own.shares(observed, terms, wrong)
        names = [name for name in wrong if shares.get(name, np.inf) <= 1]
        if names and right is not None:
            shares = own.shares(right, terms, names)
            names = [name for name in names if shares.get(name, np.inf) > 1]
        if names:
            fitting.append((row, names))
            explained.update(names)
    fitting.sort(key=lambda each: -len(each[1]))  # Stable.
    found, left = [], list(wrong)
    for row, names in fitting:
        new = [name for name in names if name in left]
        is_sure = any(is_large(dense(observed[name]), num_terms) for name in new)
        if new and (is_sure or len(new) < len(names) or not np.any(dense(observed[new[0]]))):
            others = [r.detail for r, own in fitting if r is not row and {*new} <= {*own}]
            found.append(Choice(row, tuple(new), tuple(dict.fromkeys(others))))
            left = [name for name in left if name not in new]
    return found, left


def explained_apart(names: Iterable[str], why: Callable[[str], tuple[str, str]]) -> list[Choice]:
    """Returns rows for arrays that are explained one by one; equal explanations are one row."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in names:
        groups.setdefault(why(name), []).append(name)
    return [Choice(Row(*row, []), tuple(own)) for row, own in groups.items()]
