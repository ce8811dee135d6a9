"""Matches the variables of two traces with different names, orders and layouts of axes.

Variables are paired by a map of names, else by equal layers and roles, else by their order among
variables of the same kind, role and shape, and then with the other variables of the same layer. JAX
sorts the keys of dicts, so that its order has no meaning; there, equal values must confirm a pair.
Ambiguous variables are not paired, because a wrong pair would lead to a wrong verdict.
"""

import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.data.trace import OF_GRADIENTS, STATISTIC, WEIGHT, Trace
from lockstep.numeric.arrays import Array, Named, computed, plain, stored
from lockstep.numeric.sampling import Sampled

Shape = tuple[int, ...]

# Names of the same role within a layer in different frameworks.
_ROLES = {
    **dict.fromkeys(("kernel", "weight", "w", "embedding", "embeddings"), "kernel"),
    **dict.fromkeys(("gamma", "scale"), "scale"),
    **dict.fromkeys(("bias", "b"), "bias"),
    "beta": "shift",
    **dict.fromkeys(("moving_mean", "running_mean", "mean"), "mean"),
    **dict.fromkeys(("moving_variance", "running_var", "variance", "var"), "variance"),
}
_KNOWN_ROLES = frozenset(_ROLES.values())
_COUNTERS = ("num_batches_tracked", "step", "count", "iteration", "iterations")
# Permutations of a kernel's axes between frameworks, used without a layout.
_DEPTHWISE = (2, 3, 0, 1)  # (channels, 1, height, width) ↔ (height, width, channels, 1)
_TRANSPOSES: Mapping[int, Sequence[Shape]] = {
    2: [(1, 0)],
    3: [(2, 1, 0)],
    4: [(2, 3, 1, 0), (3, 2, 0, 1)],
    5: [(2, 3, 4, 1, 0), (4, 3, 0, 1, 2)],
}


class NamesError(ValueError):
    """A map of names that does not fit the traces."""


class Pair(NamedTuple):
    """A variable that both traces have.

    Attributes:
        first: its key in the first trace.
        second: its key in the second trace.
        transpose: permutation of the second's axes to those of the first.
    """

    first: str
    second: str
    transpose: Shape

    def as_first(self, array: Array) -> Array:
        """Returns an array of the second trace in the layout of the first."""
        return _in_order(array, self.transpose)


class _Item(NamedTuple):
    """A variable with the properties used to match it with another trace.

    Attributes:
        key: its unique name.
        kind: `WEIGHT` or `STATISTIC`.
        layout: order of its axes, for example "HWIO", or "".
        shape: shape of its arrays; None if it has no array.
        layer: name of its layer.
        prefix: the layer in lower case, without the prefix common to all names.
        role: its role in the layer, for example "kernel" or "bias".
    """

    key: str
    kind: str
    layout: str
    shape: Shape | None
    layer: str
    prefix: str
    role: str

    @property
    def label(self) -> tuple[str, str, str]:
        """Kind, layer and role, normalised over frameworks."""
        return self.kind, self.prefix, self.role

    @property
    def numbered(self) -> str:
        """The part of the name with a number; "" without one."""
        part = self.prefix if self.role in _KNOWN_ROLES else f"{self.prefix}/{self.role}"
        return part if re.search(r"\d", part) else ""

    def fits(self, other: "_Item") -> bool:
        """Returns whether kinds, roles and shapes allow two variables to be the same."""
        is_known = self.role in _KNOWN_ROLES and other.role in _KNOWN_ROLES
        are_alike = self.kind == other.kind and (self.role == other.role or not is_known)
        return are_alike and _axes_between(self, other) is not None


class Matching:
    """The weights and statistics of two traces in pairs, found with one method after the other.

    Args:
        first: the trace whose layouts are used.
        second: the other trace.
        names: names in one trace → names in the other, where known.

    Attributes:
        traces: both traces.
        pairs: the pairs, in the order of the first trace.
        unmatched_first: keys of unpaired variables of the first trace.
        unmatched_second: keys of unpaired variables of the second trace.

    Raises:
        NamesError: `names` has an unknown name, or pairs variables of different shapes.
    """

    def __init__(self, first: Trace, second: Trace, names: Mapping[str, str]):
        self.traces = first, second
        self._items = _items_of(first), _items_of(second)
        self._first, self._second = map(list, self._items)  # Those without a partner.
        self.pairs: list[Pair] = []
        self._match_by_map(names)
        self._match(self._have_equal_labels())
        self._match(self._are_in_paired_layers())
        self._match(lambda a, b: a.role in ("kernel", "scale") and a.fits(b))
        self._match(self._are_in_paired_layers())
        self._match(_Item.fits)
        self._match(self._are_in_paired_layers())
        own, other = ([item.key for item in items] for items in self._items)
        order = {key: place for place, key in enumerate(own)}
        self.pairs.sort(key=lambda pair: order[pair.first])
        paired = {pair.first for pair in self.pairs}, {pair.second for pair in self.pairs}
        self.unmatched_first = [key for key in own if key not in paired[0]]
        self.unmatched_second = [key for key in other if key not in paired[1]]

    def to_first(self, named: Named) -> Named:
        """Returns arrays of the second trace with the names and layouts of the first."""
        own = {pair.first: pair for pair in self.pairs if pair.second in named}
        return computed(own, lambda name: own[name].as_first(stored(named, own[name].second)))

    def _add(self, a: _Item, b: _Item) -> None:
        axes = _axes_between(a, b)
        if axes is not None:
            self.pairs.append(Pair(a.key, b.key, axes))
        self._first.remove(a)
        self._second.remove(b)

    def _match_by_map(self, names: Mapping[str, str]) -> None:
        """Pairs the variables of a map of names, which may have either direction."""
        for pair in names.items():
            found = [(a, b) for a in self._first for b in self._second if {a.key, b.key} == {*pair}]
            if not found or _axes_between(*found[0]) is None:
                raise NamesError(
                    f"names: {pair[0]!r} and {pair[1]!r} are not one weight or statistic of"
                    f" {self.traces[0].name} and one of {self.traces[1].name} of equal shapes;"
                    " correct the names, and use each once"
                )
            self._add(*found[0])

    def _match(self, near: Callable[[_Item, _Item], bool]) -> None:
        """Pairs variables near the same ones, if these are equally many and near no others."""
        groups: dict[tuple[_Item, ...], list[_Item]] = {}
        for a in self._first:
            groups.setdefault(tuple(b for b in self._second if near(a, b)), []).append(a)
        counts = Counter(itertools.chain.from_iterable(groups))
        have_order = all(trace.about.framework != "jax" for trace in self.traces)
        for seconds, firsts in groups.items():
            if len(seconds) != len(firsts) or any(counts[b] > 1 for b in seconds):
                continue
            pairs = list(zip(firsts, seconds, strict=True))
            if len(pairs) > 1 and not have_order:
                pairs = self._with_equal_values(firsts, seconds)
            for a, b in pairs:
                self._add(a, b)

    def _have_equal_labels(self) -> Callable[[_Item, _Item], bool]:
        """Returns what tells equal labels; numbered ones only if all are equal: numbering varies.

        The same layer with another shape has no partner.
        """
        numbered = [{(i.kind, i.numbered) for i in left} for left in (self._first, self._second)]
        differing = {kind for kind, part in numbered[0] ^ numbered[1] if part}
        return lambda a, b: a.label == b.label and not (a.numbered and a.kind in differing)

    def _are_in_paired_layers(self) -> Callable[[_Item, _Item], bool]:
        """Returns what tells fitting variables of two layers with a pair, and with no other one."""
        own, other = ({item.key: item.layer for item in items} for items in self._items)
        links = {(own[pair.first], other[pair.second]) for pair in self.pairs}
        counts = Counter(x for x, _ in links), Counter(y for _, y in links)
        partners = {(x, y) for x, y in links if counts[0][x] == counts[1][y] == 1}
        return lambda a, b: (a.layer, b.layer) in partners and a.fits(b)

    def _with_equal_values(
        self, firsts: Sequence[_Item], seconds: Sequence[_Item]
    ) -> list[tuple[_Item, _Item]]:
        """Returns the pairs with unique equal values before the first common step."""
        own, other = self._values
        equal = []
        for a, b in itertools.product(firsts, seconds):
            axes = _axes_between(a, b)
            if a.key not in own or b.key not in other or axes is None:
                continue
            if np.allclose(own[a.key], _in_order(other[b.key], axes), 1e-5, 1e-8):
                equal.append((a, b))
        counts = Counter(a for a, _ in equal), Counter(b for _, b in equal)
        return [(a, b) for a, b in equal if counts[0][a] == counts[1][b] == 1]

    @functools.cached_property
    def _values(self) -> list[Named]:
        common = min({*self.traces[0].steps} & {*self.traces[1].steps}, default=None)
        if common is None:
            return [{}, {}]
        return [t.named(t.steps.index(common), "before", 0) or {} for t in self.traces]


def _in_order(array: Array, axes: Shape) -> Array:
    """Returns an array with its axes in another order; that of a sample is always the same."""
    if isinstance(array, Sampled):
        return array
    whole = plain(array)
    return np.transpose(whole, axes) if whole.ndim == len(axes) else whole


def _items_of(trace: Trace) -> list[_Item]:
    """Returns the weights and statistics of a trace, without step counters."""
    shapes, variables = _shapes(trace), trace.variables
    items: list[_Item] = []
    for kind in (WEIGHT, STATISTIC):
        parts = {key: _parts_of(v.name) for key, v in variables.items() if v.kind == kind}
        parts = {key: names for key, names in parts.items() if names[-1] not in _COUNTERS}
        # The leading parts common to all names, such as "model" or "params".
        columns = zip(*(names[:-2] for names in parts.values()), strict=False)
        shared = len(list(itertools.takewhile(lambda column: len({*column}) == 1, columns)))
        for key, (*layer, last) in parts.items():
            prefix, role = "/".join(layer[shared:]).lower(), _ROLES.get(last.lower(), last.lower())
            if role == "kernel" and len(shapes.get(key, ())) == 1:
                role = "scale"  # PyTorch has "weight" and "bias" in normalisations.
            of_key = key, kind, variables[key].layout, shapes.get(key)
            items.append(_Item(*of_key, "/".join(layer), prefix, role))
    scales = {item.layer for item in items if item.role == "scale"}
    items = [
        item._replace(role="shift") if item.role == "bias" and item.layer in scales else item
        for item in items
    ]
    order = {key: place for place, key in enumerate(trace.keys)}
    return sorted(items, key=lambda item: order[item.key])


def _parts_of(name: str) -> list[str]:
    return re.split(r"[/.:]", re.sub(r":\d+$", "", name))


def _shapes(trace: Trace) -> dict[str, Shape]:
    """Returns key → shape of every variable that has an array."""
    found: dict[str, Shape] = {}
    wanted = {key for key, kind in trace.kinds.items() if kind in (WEIGHT, STATISTIC)}
    found.update((key, v.shape) for key, v in trace.variables.items() if v.shape)
    kinds = ("before", "after", *OF_GRADIENTS)
    for position, kind in itertools.product(range(len(trace.steps)), kinds):
        for item in trace.items(kind):
            for key, array in (trace.named(position, kind, item) or {}).items():
                found.setdefault(key, plain(array).shape)
            if found.keys() >= wanted:
                return found
    return found


def _axes_between(a: _Item, b: _Item) -> Shape | None:
    """Returns the permutation of the axes of `b` to those of `a`: by layouts, else a usual one."""
    if a.shape is None or b.shape is None:
        return None
    axes = tuple(range(len(b.shape)))
    if a.layout and len({*a.layout}) == len(axes) and sorted(a.layout) == sorted(b.layout):
        usual = [tuple(map(b.layout.index, a.layout)), _DEPTHWISE]
    else:
        usual = [axes, _DEPTHWISE, *_TRANSPOSES.get(len(axes), ())]
    for order in usual:
        is_known = order != _DEPTHWISE or a.shape.count(1) == 1
        is_permutation = len(order) == len(axes) and is_known
        if is_permutation and tuple(b.shape[axis] for axis in order) == a.shape:
            return order
    return None
