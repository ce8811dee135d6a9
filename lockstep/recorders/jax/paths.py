"""Arrays in the arguments and the result of a step by their paths, as "0/params/kernel"."""

import collections
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lockstep.recorders.jax.arrays import is_array, is_key

Shapes = Mapping[str, tuple[int, ...]]
_Slot = tuple[int, tuple[str, ...], tuple[str, ...]]  # A place among keys; those there; the last.


def flatten(tree: Any, skip: int = 0) -> tuple[list[str], list[Any], Any]:
    """Returns the paths of the leaves, without the first `skip` keys, the leaves, the structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path[skip:], simple=True, separator="/") for path, _ in pairs]
    return names, [leaf for _, leaf in pairs], structure


def _places_of(where: Any) -> tuple[Any, ...]:
    return where if isinstance(where, tuple) else (where,)


def _is_at(name: str, place: Any) -> bool:
    return f"{name}/".startswith(f"{place}/")


def found_at(
    names: list[str], where: Any, role: str, arrays: Mapping[int, Any]
) -> list[tuple[int, str]]:
    """Returns index and name of the arrays at `where`; the name is relative to a single place."""
    places = _places_of(where)
    cut = 0 if len(places) > 1 else len(f"{where}/")
    found = [
        (index, name[cut:] or role)
        for place in places
        for index, name in enumerate(names)
        if index in arrays and _is_at(name, place)
    ]
    if not found and role not in ("state", "opt_state"):  # They may be empty.
        raise ValueError(f"{role}: no array at {where!r} among {', '.join(names)}")
    return found


def path_of(name: str, where: Any, role: str) -> str:
    """Returns the path of an array in the tree at `where`; several places are a tuple of trees."""
    places = _places_of(where)
    if len(places) == 1:
        return "" if name == role else name
    return next(
        f"{i}{name.removeprefix(str(place))}" for i, place in enumerate(places)
        if _is_at(name, place)
    )  # fmt: skip


# --- What a step takes and returns ---------------------------------------------------------------


def tail(name: str) -> str:
    """Returns a path without its first key, which is the position of an argument."""
    return name.partition("/")[2]


def without_role(tree: Any, skip: int, wheres: Iterable[Any]) -> dict[str, Any]:
    """Returns the arrays of a tree by their paths, without keys and those at known places."""
    names, leaves, _ = flatten(tree, skip)
    places = [place for where in wheres for place in _places_of(where)]
    return {
        name: leaf for name, leaf in zip(names, leaves, strict=True)
        if is_array(leaf) and not is_key(leaf) and not any(_is_at(name, x) for x in places)
    }  # fmt: skip


def carried_paths(given: Mapping[str, Any], returned: Mapping[str, Any]) -> dict[str, str]:
    """Returns the paths of arrays that a step takes and returns: argument → result.

    A number that has no path within its argument is a step counter, or a setting or a metric.
    """
    found: dict[str, str] = {}
    for name, own in given.items():
        kind = np.result_type(own).kind
        fits = [
            path for path, other in returned.items()
            if tail(path) == tail(name) and path not in found.values()
            and (other.shape, other.dtype.kind) == (np.shape(own), kind)
        ]  # fmt: skip
        fits.sort(key=lambda path: path != name)
        if fits and (tail(name) or kind in "iu"):
            found[name] = fits[0]
    return found


# --- Arrays of weights ---------------------------------------------------------------------------


def weights_of(weights: Shapes, arrays: Shapes) -> dict[str, tuple[str, str]]:
    """Returns array → weight and slot, for arrays whose paths are that of a weight and a slot.

    The keys of a slot are above those of the weight, as in "mu/a/kernel", below them, as in
    "a/kernel/mu", or between them, as in "generator/mu/kernel". Of several, it is the slot that
    most weights have. One that not all have, as a mask leaves some out, has the shapes of weights.
    """
    slots = collections.defaultdict[_Slot, dict[str, str]](dict)
    for path in arrays:
        for weight, slot in _parts_of(path):
            if weight in weights:
                slots[slot][path] = weight
    found, ranks = dict[str, tuple[str, str]](), dict[str, tuple[int, int]]()
    for (_, above, below), own in slots.items():
        if "/".join([*above, str(len(weights)), *below]) in arrays:
            continue  # A list of more than the weights has an order of its own.
        number = len({*own.values()})
        is_whole = number == len(weights) > 1
        for path, weight in own.items():
            rank = number, len(weight)
            # Settings, as a pair of rates beside a pair of weights, are no state of these.
            is_state = arrays[path] == weights[weight] or (is_whole and (arrays[path] or below))
            if is_state and rank > ranks.get(path, (0, 0)):
                found[path], ranks[path] = (weight, ["", *above, *below][-1]), rank
    return found


def _parts_of(path: str) -> Iterator[tuple[str, _Slot]]:
    """Yields the path of a weight and a slot, for each way to split the keys of a path."""
    keys = path.split("/") if path else []
    number = len(keys)
    for start, end in itertools.combinations_with_replacement(range(number + 1), 2):
        yield "/".join(keys[start:end]), (0, (*keys[:start],), (*keys[end:],))
    for start, end in itertools.combinations(range(1, number), 2):
        yield "/".join(keys[:start] + keys[end:]), (start, (*keys[start:end],), ())


def matched(paths: Sequence[str], weights: Sequence[str]) -> list[str] | None:
    """Returns the path of the weight of each gradient; None if one is not known.

    A tree of gradients may have the structure of the weights, or of one part of them, or hold these
    in a further tree; a list has one array for each weight, in the order of `jax.tree.leaves`.
    """
    if [*paths] in ([*weights], [str(index) for index in range(len(weights))]):
        return [*weights]
    # A device may have parts of the weights, of other shapes.
    found = weights_of(dict.fromkeys(weights, (1,)), dict.fromkeys(paths, (1,)))
    if len(found) == len(paths):
        return [found[path][0] for path in paths]
    parts = collections.defaultdict[str, dict[str, str]](dict)  # Start of paths → rest → weight.
    for weight in weights:
        for place in (i for i, character in enumerate(f"{weight}/") if character == "/"):
            parts[weight[:place]][weight[place + 1 :]] = weight
    fits = [part for part in parts.values() if part.keys() == {*paths}]
    return [fits[0][path] for path in paths] if len(fits) == 1 else None
