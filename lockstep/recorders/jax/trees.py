"""Arrays in the arguments and the result of a step, by their paths."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from lockstep.recorders.jax.arrays import is_array, is_key


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
