"""Clipped gradients that a step does not keep, read off the state of its optimizer.

A chain of Optax clips within its update. The first moment of Adam, the momentum of SGD, and the
weight under plain SGD are linear in the gradient that is applied. Where this is the gradient that
the step keeps, clipped to a norm or to a value that is a short number, as limits are, the step
clips.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.numeric.arrays import EPS, TINY, length

_UNITS = 8  # Of rounding of the state, before and after.
_SLOTS = {"adam": ("mu", "m"), "adamw": ("mu", "m"), "sgd": ("trace", "momentum", "velocity")}


class _Used(NamedTuple):
    """The gradient that an update applies, and how far rounding may move each element."""

    gradient: np.ndarray
    slack: np.ndarray


def clipped_by_state(
    optimizer: Mapping[str, Any], variables: Sequence[Mapping[str, str]], names: Sequence[str],
    gradients: Sequence[np.ndarray], before: Sequence[np.ndarray], after: Sequence[np.ndarray],
) -> list[np.ndarray] | None:  # fmt: skip
    """Returns the clipped gradients of a device; None if they are not clipped, or not known.

    Args:
        optimizer: class and settings in this step.
        variables: the descriptions of the arrays before and after the step.
        names: the weights of the gradients.
        gradients: the whole gradients, before clipping.
        before, after: the state of the device.
    """
    places = {
        (each.get("of", each["name"]), each.get("slot", "")): i for i, each in enumerate(variables)
    }
    used = []
    for name, gradient in zip(names, gradients, strict=True):
        found = _used(optimizer, places, name, before, after)
        if found is None or found.gradient.shape != gradient.shape:
            return None
        used.append(found)
    joined = _joined(gradients)
    whole = _Used(_joined([x.gradient for x in used]), _joined([x.slack for x in used]))
    limit = _norm_limit(joined, whole)
    if limit:
        return [(g * (limit / length(joined))).astype(g.dtype) for g in gradients]
    limit = _value_limit(joined, whole)
    return [g.clip(-limit, limit) for g in gradients] if limit else None


def _wide(array: np.ndarray) -> np.ndarray:
    return np.asarray(array, np.float64)


def _joined(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([_wide(array).ravel() for array in arrays])


def _used(
    optimizer: Mapping[str, Any], places: Mapping[tuple[str, str], int], name: str,
    before: Sequence[np.ndarray], after: Sequence[np.ndarray],
) -> _Used | None:  # fmt: skip
    """Returns the gradient of a weight that the rule of its optimizer has applied."""
    kind = str(optimizer.get("class", "")).lower()
    slots = _SLOTS.get(kind, ())
    kept, times = optimizer.get("momentum") or 0.0, 1.0
    if kind.startswith("adam"):
        kept = optimizer.get("beta_1", 0.9)
        times = 1 - kept
    elif not kept:
        kept, times, slots = 1.0, -(optimizer.get("learning_rate") or 0.0), ("",)
    index = next((places[name, slot] for slot in slots if (name, slot) in places), None)
    if index is None or not times or after[index].dtype.kind != "f":
        return None
    old, new = kept * _wide(before[index]), _wide(after[index])
    decay = 0.0 if kind == "adamw" else optimizer.get("weight_decay") or 0.0
    decayed = decay * _wide(before[places[name, ""]])
    slack = _UNITS * EPS * ((np.abs(old) + np.abs(new)) / abs(times) + np.abs(decayed)) + TINY
    return _Used((new - old) / times - decayed, slack)


def _norm_limit(gradient: np.ndarray, used: _Used) -> float:
    """Returns the norm to which a gradient was clipped; 0 if it was not."""
    square = float(np.sum(gradient * gradient))
    factor = float(np.sum(used.gradient * gradient)) / square if square else 1.0
    limit = _short(factor * square**0.5, used) if 0 < factor < 1 else 0.0
    return limit if limit and _are_near(used, gradient * (limit / square**0.5)) else 0.0


def _value_limit(gradient: np.ndarray, used: _Used) -> float:
    """Returns the value to which elements were clipped; 0 if they were not."""
    largest = float(np.max(np.abs(used.gradient), initial=0.0))
    limit = _short(largest, used) if largest < np.max(np.abs(gradient), initial=0.0) else 0.0
    return limit if limit and _are_near(used, gradient.clip(-limit, limit)) else 0.0


def _are_near(used: _Used, expected: np.ndarray) -> bool:
    bound = used.slack + _UNITS * EPS * np.abs(expected)
    return bool(np.all(np.abs(used.gradient - expected) <= bound))


def _short(number: float, used: _Used) -> float:
    """Returns the number of two digits, or three where it is known well, that is near; else 0."""
    apart = max(4 * EPS, length(used.slack) / max(length(used.gradient), TINY))
    short = float(f"{number:.{3 if apart <= 1e-5 else 2}g}")
    return short if apart <= 1e-3 and abs(number - short) <= apart * short else 0.0
