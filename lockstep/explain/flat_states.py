"""Explains updates of weights that a script flattens into one vector, each rank a part of it.

Of such an optimizer, the state is one vector. It is linear in the gradient: X' = β · X + gradient.
"""

from collections.abc import Iterator

import numpy as np

from lockstep.data.trace import WEIGHT
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import dense, is_far, norm
from lockstep.reference import StepPair

_CLOSE = 1e-4  # Relative; of state in float32.
_PADDING = 64  # Elements that may fill a vector up.


def flat_states(pair: StepPair) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields stage, cause, sentence, and names of weights in the checked recording."""
    if pair.gradients.names or not pair.has("before", "after"):
        return
    weights = [n for n in pair.matching.pairs if pair.first.trace.kinds[n.first] == WEIGHT]
    names = [each.second for each in weights]
    befores, afters = (
        [step.named(kind)[0] for step in (pair.first, pair.second)] for kind in ("before", "after")
    )
    keys_of = [n.first for n in weights], names
    if any(key not in after for own, after in zip(keys_of, afters, strict=True) for key in own):
        return
    flat, other = (
        np.concatenate([dense(after[key]).ravel() for key in own])
        for own, after in zip(keys_of, afters, strict=True)
    )
    numbers = {pair.second.trace.about.num_replicas, len(pair.second.copies)} - {1}
    common = [step.trace.slots.get("", {}) for step in (pair.first, pair.second)]
    for slot in common[0].keys() & common[1].keys():
        keys = [own[slot] for own in common]
        if any(key not in after for after, key in zip(afters, keys, strict=True)):
            continue
        first, second = (dense(after[key]) for after, key in zip(afters, keys, strict=True))
        old = dense(befores[0].get(keys[0], np.zeros(first.shape)))
        size = flat.size
        if {a.shape for a in (first, second)} != {old.shape} or old.ndim != 1:
            continue
        if not size <= old.size < size + _PADDING:
            continue
        for number in sorted(numbers):
            if old.size % number == 0 and _are_reversed(flat, other, old.size, number):
                text = f"the {number} parts of the flat weights are put together in reverse order"
                yield "update", "swapped_parts", text, names
                return
            why = _of_norms(old, first, second, number) if old.size % number == 0 else ""
            if why:
                yield "clipping", "clipped_by_local_norm", why, names
                return
        if shift := _shift(old, first, second, old.size - size):
            text = f"the flat gradient is {shift:+d} elements beside the flat weights"
            yield "update", "swapped_parts", text, names
            return


def _are_reversed(first: np.ndarray, second: np.ndarray, size: int, number: int) -> bool:
    filled = np.pad(first, (0, size - first.size))
    exchanged = np.concatenate(np.split(filled, number)[::-1])[: first.size]
    return not is_far(second, exchanged, _CLOSE) and is_far(second, first, _CLOSE)


def _of_norms(old: np.ndarray, first: np.ndarray, second: np.ndarray, number: int) -> str:
    """Explains state of which each part follows its own gradient, clipped to one norm."""
    parts = [np.split(array, number) for array in (old, first, second)]
    factors, kept = list[float](), list[float]()
    for before, right, own in zip(*parts, strict=True):
        solved, known = solve({"": own}, [{"": right}, {"": before}])
        factor = float(solved[0])
        more = float(solved[1]) if known[1] and np.isfinite(solved[1]) else 0.0
        if not (known[0] and factor > 0) or is_far(own, factor * right + more * before, _CLOSE):
            return ""
        if np.any(before) and abs(factor - 1) > _CLOSE:
            kept.append(more / (1 - factor))
        factors.append(factor)
    if np.ptp([1, *factors]) <= _CLOSE or (kept and np.ptp(kept) > 1e-2):
        return ""
    beta = float(np.mean(kept)) if kept else 0.0
    limit = norm(first - beta * old)
    norms = [norm(own - beta * before) for before, _, own in zip(*parts, strict=True)]
    if np.ptp([limit, *norms]) > 1e-3 * limit:
        return ""
    return f"the gradient of each of {number} parts is clipped to norm {limit:.4g} on its own"


def _shift(old: np.ndarray, first: np.ndarray, second: np.ndarray, most: int) -> int:
    """Returns by how many elements the gradient is shifted; 0 if that explains nothing."""
    for shift in [s for far in range(1, most + 1) for s in (far, -far)]:
        terms = [{"": array} for array in (np.roll(first, shift), np.roll(old, shift), old)]
        factors, known = solve({"": second}, terms)
        factors = np.where(known & np.isfinite(factors), factors, 0.0)
        value = np.sum([f * t[""] for f, t in zip(factors, terms, strict=True)], axis=0)
        is_right = not is_far(second, value, _CLOSE) and is_far(second, first, _CLOSE)
        if abs(factors[0] - 1) < 1e-3 and is_right:
            return shift
    return 0
