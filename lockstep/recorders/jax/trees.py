"""Arrays in the arguments and the result of a step by their paths, and trees like the weights."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lockstep.recorders.jax.arrays import is_array, is_key

Shapes = Mapping[str, tuple[int, ...]]


def flatten(tree: Any, skip: int = 0) -> tuple[list[str], list[Any], Any]:
    """Returns the paths of the leaves, without the first `skip` keys, the leaves, the structure."""
    pairs, structure = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path[skip:], simple=True, separator="/") for path, _ in pairs]
    return names, [leaf for _, leaf in pairs], structure


def found_at(
    names: list[str], where: Any, role: str, arrays: Mapping[int, Any]
) -> list[tuple[int, str]]:
    """Returns index and name of the arrays at `where`; the name is relative to a single place."""
    places = where if isinstance(where, tuple) else (where,)
    cut = 0 if len(places) > 1 else len(f"{where}/")
    found = [
        (index, name[cut:] or role)
        for place in places
        for index, name in enumerate(names)
        if index in arrays and f"{name}/".startswith(f"{place}/")
    ]
    if not found and role not in ("state", "opt_state"):  # They may be empty.
        raise ValueError(f"{role}: no array at {where!r} among {', '.join(names)}")
    return found


# --- What a step takes and returns ---------------------------------------------------------------


def tail(name: str) -> str:
    """Returns a path without its first key, which is the position of an argument."""
    return name.partition("/")[2]


def without_role(
    names: Sequence[str], leaves: Sequence[Any], roles: Iterable[Sequence[tuple[int, str]]]
) -> dict[str, tuple[Any, ...]]:
    """Returns path → shape and kind of arrays, without keys, that have no role."""
    known = {index for pairs in roles for index, _ in pairs}
    arrays = {n: x for i, (n, x) in enumerate(zip(names, leaves, strict=True)) if i not in known}
    arrays = {n: x for n, x in arrays.items() if is_array(x) and not is_key(x)}
    return {n: (np.shape(x), np.result_type(x).kind) for n, x in arrays.items()}


def carried_paths(given: Mapping[str, Any], returned: Mapping[str, Any]) -> dict[str, str]:
    """Returns the paths of arrays that a step takes and returns: argument → result.

    A number that has no path within its argument is a step counter, or a setting or a metric.
    """
    found: dict[str, str] = {}
    for name, kind in given.items():
        free = [n for n, other in returned.items() if other == kind and n not in found.values()]
        fits = [n for n in free if tail(n) == tail(name)]
        fits.sort(key=lambda n: n != name)
        if fits and (tail(name) or kind[1] in "iu"):
            found[name] = fits[0]
    return found


# --- Trees that mirror the weights ---------------------------------------------------------------


def names_at(tree: Any, where: Any, pairs: Sequence[tuple[int, str]]) -> Any:
    """Returns the tree at `where` with the names of its arrays; None in place of other leaves.

    Args:
        tree: a dictionary of arguments, with the indices of their leaves.
        where: as `found_at` takes it; several places give a tuple.
        pairs: index and name of the arrays.
    """
    names, places = dict(pairs), where if isinstance(where, tuple) else (where,)
    found = [jax.tree.map(names.get, _at(tree, str(place))) for place in places]
    return found[0] if len(found) == 1 else tuple(found)


def _at(tree: Any, path: str) -> Any:
    """Returns the part of a tree at a path; None if there is none."""
    if not path:
        return tree
    parts = (
        _at(child, path[len(name) + 1 :])
        for name, child in _children(tree) if f"{path}/".startswith(f"{name}/")
    )  # fmt: skip
    return next((part for part in parts if part is not None), None)


def _children(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yields key and value of the parts of a tree; nothing of a leaf."""
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    for path, child in pairs:
        if path:
            yield jax.tree_util.keystr(path, simple=True, separator="/"), child


def weights_of(weights: Any, tree: Any, sizes: Shapes, own_sizes: Shapes) -> dict[str, Any]:
    """Returns array → weight and slot, for the parts of a tree that mirror that of the weights.

    A part mirrors them if it has their structure; or has it with something else in place of each
    weight, as several arrays, or nothing where a mask leaves it out. A tree with parts for several
    models mirrors each of them under its key. The slot is the last key above the array's path in
    the mirror, or below it.

    Args:
        weights, tree: trees of names.
        sizes, own_sizes: the shapes of the weights, and of the arrays of the tree.
    """
    structure, known = jax.tree.structure(weights), jax.tree.leaves(weights)

    def fits(weight: str, name: str) -> bool:
        # Settings, as a pair of rates beside a pair of weights, mirror nothing.
        return bool(own_sizes[name]) or not sizes[weight]

    def found_in(part: Any, slot: str) -> dict[str, Any]:
        if jax.tree.structure(part) == structure:
            own = jax.tree.leaves(part)
            is_same = len(known) > 1 or own_sizes[own[0]] == sizes[known[0]]
            if is_same and all(map(fits, known, own)):
                return {name: (weight, slot) for weight, name in zip(known, own, strict=True)}
        found: dict[str, Any] = {}
        for key, child in _children(part):
            found |= found_in(child, key.split("/")[-1])
        return found or of_each(part, slot)

    def of_each(part: Any, slot: str) -> dict[str, Any]:
        try:
            parts = structure.flatten_up_to(part) if len(known) > 1 else []
        except ValueError:
            return {}
        found = {}
        for weight, own in zip(known, parts, strict=False):
            paths, names, _ = flatten(own)
            for path, name in zip(paths, names, strict=True):
                found[name] = weight, path.split("/")[-1] or slot
        is_right = all(own_sizes[name] in ((), sizes[w]) for name, (w, _) in found.items())
        return found if is_right and any(map(own_sizes.get, found)) else {}

    if not known or (found := found_in(tree, "")):
        return found if known else {}
    own = dict(_children(tree))
    return {
        name: each
        for key, part in _children(weights)
        if key in own and [*_children(part)]  # Single weights of lists have no names in common.
        for name, each in weights_of(part, own[key], sizes, own_sizes).items()
    }  # fmt: skip


def part_with_structure(weights: Any, tree: Any) -> list[str] | None:
    """Returns the weights of the one part that has the structure of a tree; None without one."""
    structure = jax.tree.structure(tree)

    def parts_in(part: Any) -> Iterator[Any]:
        if jax.tree.structure(part) == structure:
            yield part
        for _, child in _children(part):
            yield from parts_in(child)

    found = [*parts_in(weights)]
    return jax.tree.leaves(found[0]) if len(found) == 1 else None
