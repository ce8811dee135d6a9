"""Rows: expressions that may explain wrong arrays, as data, and the choice among them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from lockstep.explain.solve import is_large
from lockstep.numeric.arrays import Named, dense
from lockstep.numeric.tolerance import Expression


class Meaning(NamedTuple):
    """What coefficients mean: the detail of a cause, with a reason in words."""

    detail: str
    reason: str


class Bound(Protocol):
    """How far rounding can move arrays: `numeric.tolerance.Tolerance`, or that of a sum."""

    def shares(
        self, observed: Named, expression: Expression, names: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Returns name → distance of an array from an expression, over its bound."""


class Row(NamedTuple):
    """An expression that may explain arrays, and what it means.

    Attributes:
        detail: the exact name, a key of `causes.DETAILS`.
        text: one sentence with the numbers.
        expression: coefficients and terms.
        items: numbers of the shards that it names; empty for all.
        factors: of a row of what shards send, the coefficients with which their gradients give
            that of the whole batch; empty where the terms are others.
        bound: a bound of its own; None for that of the arrays.
    """

    detail: str
    text: str
    expression: Expression
    items: tuple[int, ...] = ()
    factors: tuple[float, ...] = ()
    bound: Bound | None = None


class Choice(NamedTuple):
    """A row, the arrays that it explains, and other rows that explain them as well."""

    row: Row
    names: tuple[str, ...]
    may_be: tuple[str, ...] = ()


def choose(
    observed: Named, wrong: Sequence[str], rows: Iterable[Row], bound: Bound, num_terms: int
) -> tuple[list[Choice], list[str]]:
    """Returns the rows that explain wrong arrays, and the names of those that none explains.

    A row that explains more of them comes first; of equal ones the first in order, the most
    specific. An array with few elements joins a row that larger ones show, and selects none.

    Args:
        observed: the arrays.
        wrong: names of those that are not right.
        rows: the rows, the most specific first.
        bound: the bound of the arrays.
        num_terms: the largest number of solved coefficients of a row.
    """
    fitting = []
    for row in rows:
        shares = (row.bound or bound).shares(observed, row.expression, wrong)
        if names := [name for name in wrong if shares.get(name, np.inf) <= 1]:
            fitting.append((row, names))
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
