"""Reads the variables of a trace with the properties used to match them."""

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.trace import OF_GRADIENTS, STATISTIC, WEIGHT, Array, Rows, Trace, Variable

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


class Item(NamedTuple):
    """A variable with the properties used to match it with another trace.

    Attributes:
        place: its position among the variables.
        key: its unique name.
        variable: name, kind and layout.
        shape: shape of its arrays; None if it has no array.
        layer: name of its layer.
        prefix: the layer in lower case, without the prefix common to all names.
        role: its role in the layer, for example "kernel" or "bias".
    """

    place: int
    key: str
    variable: Variable
    shape: Shape | None
    layer: str
    prefix: str
    role: str

    @property
    def label(self) -> tuple[str, str, str]:
        """Kind, layer and role, normalised over frameworks."""
        return self.variable.kind, self.prefix, self.role

    @property
    def size(self) -> Shape:
        """The lengths of the axes in any order."""
        return tuple(sorted(self.shape or ()))

    @property
    def numbered(self) -> str | None:
        """The part of the name with a number; None without one."""
        part = self.prefix if self.role in _KNOWN_ROLES else f"{self.prefix}/{self.role}"
        return part if re.search(r"\d", part) else None


def read_items(trace: Trace) -> list[Item]:
    """Returns the weights and statistics of a trace, without step counters."""
    variables, shapes = trace.about.variables, _shapes(trace)
    parts = [re.split(r"[/.:]", re.sub(r":\d+$", "", v.name)) for v in variables]
    items = []
    for kind in (WEIGHT, STATISTIC):
        indices = [
            index
            for index, variable in enumerate(variables)
            if variable.kind == kind and parts[index][-1] not in _COUNTERS
        ]
        shared = _num_shared([parts[index][:-2] for index in indices])
        for index in indices:
            last = parts[index][-1].lower()
            layer, prefix = ("/".join(parts[index][start:-1]) for start in (0, shared))
            key, role = trace.keys[index], _ROLES.get(last, last)
            of_key = key, variables[index], shapes.get(key)
            items.append(Item(index, *of_key, layer, prefix.lower(), role))
    return _with_scales(sorted(items, key=lambda item: item.place))


def _with_scales(items: Sequence[Item]) -> list[Item]:
    """Returns the items with roles of normalisation: PyTorch has "weight" and "bias"."""
    vectors = {i.place for i in items if i.role == "kernel" and len(i.shape or ()) == 1}
    scales = {i.layer for i in items if i.role == "scale" or i.place in vectors}
    found = []
    for item in items:
        is_shift = item.role == "bias" and item.layer in scales
        role = "scale" if item.place in vectors else "shift" if is_shift else item.role
        found.append(item._replace(role=role))
    return found


def has_order(trace: Trace, items: Sequence[Item]) -> bool:
    """Returns whether the order of the weights has a meaning; JAX sorts the keys of dicts."""
    names = [re.split(r"[/.:]", i.variable.name) for i in items if i.variable.kind == WEIGHT]
    keys = [[(part.isdecimal(), part.zfill(9), part) for part in name] for name in names]
    children: dict[tuple[str, ...], set[str]] = {}
    for name in names:
        for depth, part in enumerate(name):
            is_role = depth == len(name) - 1 and part.lower() in _ROLES
            if not is_role and not part.isdecimal():
                children.setdefault(tuple(name[:depth]), set()).add(part)
    has_dicts = any(len(parts) > 1 for parts in children.values())
    return trace.about.framework != "jax" or not has_dicts or keys != sorted(keys)


def _num_shared(prefixes: Sequence[Sequence[str]]) -> int:
    """Returns the number of leading parts common to all names, such as "model" or "params"."""
    columns = zip(*prefixes, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, columns))


def _shapes(trace: Trace) -> dict[str, Shape]:
    """Returns key → shape of every variable that has an array."""
    found: dict[str, Shape] = {}
    wanted = {key for key, kind in trace.kinds.items() if kind in (WEIGHT, STATISTIC)}
    for position in range(len(trace.steps)):
        for kind in ("before", "after", *OF_GRADIENTS):
            for item in trace.items(kind):
                for key, array in (trace.named(position, kind, item) or {}).items():
                    found.setdefault(key, _shape_of(array))
                if found.keys() >= wanted:
                    return found
    return found


def _shape_of(array: Array) -> Shape:
    is_rows = isinstance(array, Rows)
    return (array.rows, *array.values.shape[1:]) if is_rows else np.shape(array)


def has_same_role(a: Item, b: Item) -> bool:
    """Returns whether the roles of two variables allow them to be the same."""
    is_known = a.role in _KNOWN_ROLES and b.role in _KNOWN_ROLES
    return a.variable.kind == b.variable.kind and (a.role == b.role or not is_known)


def axes_by_layout(a: Item, b: Item) -> Shape | None:
    """Returns the permutation of axes implied by both layouts, if it makes the shapes equal."""
    own, other = a.variable.layout, b.variable.layout
    num_axes = len(b.shape or ())
    axes = tuple(map(other.index, own)) if _is_same_axes(a, b) else tuple(range(num_axes))
    return axes if a.shape is not None and transposed_shape(b, axes) == a.shape else None


def axes_by_order(a: Item, b: Item) -> Shape | None:
    """Returns a permutation of axes that makes the shapes equal and contradicts no layout."""
    if _is_same_axes(a, b):
        axes = axes_by_layout(a, b)
        return _first_fitting(a, b, [_DEPTHWISE]) if axes is None else axes
    return axes_by_any(a, b)


def axes_by_any(a: Item, b: Item) -> Shape | None:
    """Returns the first common permutation of axes that makes the shapes equal."""
    axes, num_axes = axes_by_layout(a, b), len(b.shape or ())
    if axes is not None:
        return axes
    usual = [tuple(range(num_axes)), *_TRANSPOSES.get(num_axes, ())]
    is_depthwise = a.shape is not None and a.shape.count(1) == 1
    return _first_fitting(a, b, [_DEPTHWISE, *usual] if is_depthwise else usual)


def _is_same_axes(a: Item, b: Item) -> bool:
    """Returns whether both layouts are known and have the same axes."""
    own, other = a.variable.layout, b.variable.layout
    return own != "" and len(set(own)) == len(own) and sorted(own) == sorted(other)


def _first_fitting(a: Item, b: Item, orders: Iterable[Shape]) -> Shape | None:
    if a.shape is None:
        return None
    return next((axes for axes in orders if transposed_shape(b, axes) == a.shape), None)


def transposed_shape(item: Item, axes: Shape) -> Shape | None:
    """Returns the shape with permuted axes; None for another number of axes."""
    if item.shape is None or len(item.shape) != len(axes):
        return None
    return tuple(item.shape[axis] for axis in axes)
