"""Matches the variables of two traces with different names, orders and layouts of axes.

Variables are paired by a map of names, else by equal names, else by their order among variables of
the same kind, role and shape, and then with the other variables of the same layer. The order of
sorted names has no meaning; there, equal values must confirm a pair. Ambiguous variables are not
paired, because a wrong pair would lead to a wrong finding.
"""

import collections
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.arithmetic import plain
from lockstep.match_variables import (
    Item,
    Shape,
    axes_by_any,
    axes_by_layout,
    axes_by_order,
    has_order,
    has_same_role,
    read_items,
)
from lockstep.trace import STATISTIC, WEIGHT, Named, Trace


class NamesError(ValueError):
    """A map of names that does not fit the traces."""


class Pair(NamedTuple):
    """A variable that both traces have.

    Attributes:
        first: its key in the first trace.
        second: its key in the second trace.
        transpose: permutation of the second's axes to those of the first; None for the same order.
    """

    first: str
    second: str
    transpose: Shape | None


class Matching(NamedTuple):
    """The paired variables of two traces.

    Attributes:
        pairs: weights and statistics, in the order of the first trace.
        unmatched_first: keys of unpaired variables of the first trace.
        unmatched_second: keys of unpaired variables of the second trace.
    """

    pairs: tuple[Pair, ...]
    unmatched_first: tuple[str, ...]
    unmatched_second: tuple[str, ...]

    def to_first(self, named: Named) -> Named:
        """Returns arrays of the second trace with the names and layouts of the first."""
        pairs = {pair.second: pair for pair in self.pairs}
        found = {pairs[name].first: (pairs[name], a) for name, a in named.items() if name in pairs}
        return {
            name: a if pair.transpose is None else np.transpose(plain(a), pair.transpose)
            for name, (pair, a) in found.items()
        }


_Fit = Callable[[Item, Item], Shape | None]


def match_variables(first: Trace, second: Trace, names: Mapping[str, str]) -> Matching:
    """Pairs the weights and statistics of two traces.

    Args:
        first: the trace whose layouts are used.
        second: the other trace.
        names: names in one trace → names in the other, where known.

    Raises:
        NamesError: `names` has an unknown name, or pairs variables of different shapes.
    """
    return _Matcher(first, second).match(names)


class _Matcher:
    """Pairs the variables of two traces with one method after the other."""

    def __init__(self, first: Trace, second: Trace):
        self._traces = first, second
        self._all = read_items(first), read_items(second)
        self._first, self._second = map(list, self._all)
        self._has_order = all(map(has_order, self._traces, self._all))
        self._refused: tuple[list[Item], list[Item]] = ([], [])
        self._pairs: list[Pair] = []
        self._values: tuple[Named, Named] | None = None

    def match(self, names: Mapping[str, str]) -> Matching:
        """Returns all pairs, and the unpaired variables."""
        self._match_by_map(names)
        self._match_by_name(lambda item: (item.variable.kind, item.variable.name))
        self._match_by_name(lambda item: item.label)
        self._match_by_layer()
        for fit in (axes_by_layout, axes_by_order):
            for roles in (("kernel",), ("scale",), None):
                self._match_by_order(fit, roles)
                self._match_by_layer()
        order = {key: index for index, key in enumerate(self._traces[0].keys)}
        return Matching(
            tuple(sorted(self._pairs, key=lambda pair: order[pair.first])),
            _keys(self._first, self._refused[0]),
            _keys(self._second, self._refused[1]),
        )

    def _add(self, a: Item, b: Item, fit: _Fit) -> None:
        axes = fit(a, b)
        assert axes is not None
        self._pairs.append(_pair(a, b, axes))
        self._first.remove(a)
        self._second.remove(b)

    def _match_by_map(self, names: Mapping[str, str]) -> None:
        for pair in names.items():
            found = self._find(*pair) or self._find(*reversed(pair))
            if found is None:
                raise NamesError(
                    f"names: {pair[0]!r} and {pair[1]!r} are not one weight or statistic of"
                    f" {self._traces[0].name} and one of {self._traces[1].name}; correct the names,"
                    " and use each once"
                )
            a, b = found
            if axes_by_any(a, b) is None:
                raise NamesError(
                    f"names: {a.key!r} has shape {a.shape}, and {b.key!r} {b.shape}; pair variables"
                    " of equal shapes"
                )
            self._add(a, b, axes_by_any)

    def _find(self, first: str, second: str) -> tuple[Item, Item] | None:
        a = next((item for item in self._first if item.key == first), None)
        b = next((item for item in self._second if item.key == second), None)
        return None if a is None or b is None else (a, b)

    def _match_by_name(self, label: Callable[[Item], tuple[str, ...]]) -> None:
        """Pairs equal names; numbered ones only if all are equal, since numbering varies."""
        own, other = _by_label(self._first, label), _by_label(self._second, label)
        differing = {
            kind
            for kind in (WEIGHT, STATISTIC)
            if _numbered(self._first, kind) != _numbered(self._second, kind)
        }
        for key, a in own.items():
            b = other.get(key)
            if a is None or b is None or (a.numbered and a.variable.kind in differing):
                continue
            if axes_by_any(a, b) is not None:
                self._add(a, b, axes_by_any)
            else:  # The same layer with another shape has no partner.
                self._first.remove(a)
                self._second.remove(b)
                self._refused[0].append(a)
                self._refused[1].append(b)

    def _match_by_order(self, fit: _Fit, roles: Sequence[str] | None) -> None:
        """Pairs variables that fit the same ones, if these are equally many and fit no others."""
        groups: dict[tuple[int, ...], list[Item]] = {}
        for a in self._first:
            if roles and a.role not in roles:
                continue
            near = [b for b in self._second if b.size == a.size and has_same_role(a, b)]
            fitting = tuple(b.place for b in near if fit(a, b) is not None)
            groups.setdefault(fitting, []).append(a)
        counts = collections.Counter(itertools.chain.from_iterable(groups))
        seconds = {b.place: b for b in self._second}
        for indices, firsts in groups.items():
            if len(indices) != len(firsts) or any(counts[index] > 1 for index in indices):
                continue
            others = [seconds[index] for index in indices]
            pairs = list(zip(firsts, others, strict=True))
            if len(pairs) > 1 and not self._has_order:
                pairs = self._pairs_of_values(firsts, others, fit)
            for a, b in pairs:
                self._add(a, b, fit)

    def _pairs_of_values(
        self, firsts: Sequence[Item], seconds: Sequence[Item], fit: _Fit
    ) -> list[tuple[Item, Item]]:
        """Returns the pairs with unique equal values before the first common step."""
        if self._values is None:
            self._values = self._read_values(self._traces[0]), self._read_values(self._traces[1])
        own, other = self._values
        equal = []
        for a, b in itertools.product(firsts, seconds):
            axes = fit(a, b)
            if a.key in own and b.key in other and axes is not None:
                equal += [(a, b)] * _is_close(own[a.key], np.transpose(other[b.key], axes))
        counts = [
            collections.Counter(item.place for item in column)
            for column in zip(*equal, strict=True)
        ]
        return [(a, b) for a, b in equal if counts[0][a.place] == counts[1][b.place] == 1]

    def _read_values(self, trace: Trace) -> Named:
        common = sorted(set(self._traces[0].steps) & set(self._traces[1].steps))
        return (trace.named(trace.steps.index(common[0]), "before", 0) if common else None) or {}

    def _match_by_layer(self) -> None:
        """Pairs variables of the same role in layers with a paired variable."""
        own, other = ({item.key: item.layer for item in items} for items in self._all)
        links = {(own[pair.first], other[pair.second]) for pair in self._pairs}
        counts = [collections.Counter(side) for side in zip(*links, strict=True)]
        partners = {x: y for x, y in links if counts[0][x] == counts[1][y] == 1}
        firsts, seconds = _by_layer(self._first), _by_layer(self._second)
        for a in list(self._first):
            candidates = seconds.get(partners[a.layer], []) if a.layer in partners else []
            near = [b for b in candidates if has_same_role(a, b)]
            rivals = [c for c in firsts[a.layer] if has_same_role(c, a)]
            if len(near) == len(rivals) == 1 and axes_by_order(a, near[0]) is not None:
                self._add(a, near[0], axes_by_order)


def _keys(*items: Iterable[Item]) -> tuple[str, ...]:
    return tuple(item.key for item in sorted(itertools.chain(*items), key=lambda i: i.place))


def _numbered(items: Sequence[Item], kind: str) -> set[str]:
    """Returns the numbered parts of names of a kind."""
    return {item.numbered for item in items if item.variable.kind == kind and item.numbered}


def _by_layer(items: Sequence[Item]) -> dict[str, list[Item]]:
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.layer, []).append(item)
    return found


def _is_close(x: np.ndarray, y: np.ndarray) -> bool:
    """Returns whether all values are equal within rounding; mostly decided by a few of them."""
    few = np.array(x.flat[:1000]), np.array(y.flat[:1000])
    return bool(np.allclose(*few, 1e-5, 1e-8) and np.allclose(x, y, 1e-5, 1e-8))


def _pair(a: Item, b: Item, axes: Shape) -> Pair:
    transpose = None if axes == tuple(range(len(axes))) else axes
    return Pair(a.key, b.key, transpose)


def _by_label(
    items: Sequence[Item], label: Callable[[Item], tuple[str, ...]]
) -> dict[tuple[str, ...], Item | None]:
    """Returns label → item; None for an ambiguous label."""
    counts = collections.Counter(map(label, items))
    return {label(item): item if counts[label(item)] == 1 else None for item in items}
