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


def weights_of_state(
    weights: Mapping[str, tuple[int, ...]], state: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, str]]:
    """Returns path of an array of an optimizer's state → its weight, and its slot.

    A tree within the state may mirror that of the weights; or a list has arrays for each weight,
    in the order of the weights.

    Args:
        weights: path of each weight → its shape.
        state: path of each array of the state → its shape.
    """
    found = {}
    for name, shape in state.items():
        fitting = [w for w in weights if f"/{name}".endswith(f"/{w}") and weights[w] == shape]
        for weight in sorted(fitting, key=len, reverse=True):
            above = name.removesuffix(weight)
            if _mirrors(weights, state, above):
                found[name] = weight, above.strip("/").split("/")[-1] or "momentum"
                break
    lists: dict[str, list[str]] = {}
    for name, shape in state.items():
        above, _, key = name.rpartition("/")
        if key.isdigit() and shape and name not in found:
            lists.setdefault(above, []).append(name)
    for names in lists.values():
        found |= _in_order(weights, {name: state[name] for name in names})
    return found


def _mirrors(
    weights: Mapping[str, tuple[int, ...]], state: Mapping[str, tuple[int, ...]], above: str
) -> bool:
    """Returns whether arrays below a path have the paths and shapes of the weights.

    A tree may lack weights, as those that are masked; numbers alone are no names of a weight.
    """
    own = {weight: state[above + weight] for weight in weights if above + weight in state}
    is_numbered = all(weight.isdigit() for weight in weights)
    is_whole = len(own) == len(weights) and f"{above}{len(weights)}" not in state
    if is_numbered and not is_whole:
        return False
    return not is_numbered or all(weights[weight] == shape for weight, shape in own.items())


def _in_order(
    weights: Mapping[str, tuple[int, ...]], arrays: Mapping[str, tuple[int, ...]]
) -> dict[str, tuple[str, str]]:
    """Returns path of an array → weight and slot, if one order alone has their shapes."""
    times = len(arrays) // max(len(weights), 1)
    by_weight = [(weight, str(k)) for weight in weights for k in range(times)]
    by_slot = [(weight, str(k)) for k in range(times) for weight in weights]
    fitting = [
        order
        for order in ([by_weight] if times == 1 else [by_weight, by_slot])
        if [weights[weight] for weight, _ in order] == [*arrays.values()]
    ]
    return dict(zip(arrays, fitting[0], strict=True)) if len(fitting) == 1 else {}
