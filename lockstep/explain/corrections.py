"""Explains updates of optimizers like Adam whose moments are corrected by other counts of updates.

Of a class that is not known, the reference's update shows whether it is that of Adam, with the
recorded settings: W' = (1 - rate · decay) · W - rate · c₁ · m' / (√(c₂ · v') + ε), with
c = 1 / (1 - βᵗ).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.explain.kept import Change
from lockstep.numeric.arrays import dense, norm

_CLOSE = 1e-4  # Relative; of updates in float32.
_SAMPLE = 256  # Elements that select a count.
_MOST = 2048  # Updates; later, the moments need no correction.
_NEEDED = "learning_rate", "beta_1", "beta_2", "epsilon"


class _Moments(NamedTuple):
    """A weight before an update, its moments after it, and what it changes by in both trainings."""

    weight: np.ndarray
    first: np.ndarray
    second: np.ndarray
    by: Sequence[np.ndarray]


def other_count(
    settings: Mapping[str, Any], wrong: Sequence[Change], states: Sequence[Change]
) -> tuple[str, str] | None:
    """Returns cause and sentence if each wrong weight is corrected by another count.

    Args:
        settings: those of the weights in both trainings.
        wrong: the weights, whose state is right.
        states: state of all weights.
    """
    if not wrong or any(not isinstance(settings.get(name), int | float) for name in _NEEDED):
        return None
    counts = list[tuple[int, int]]()
    for change in wrong:
        found = _counts(settings, change, [x for x in states if x.weight == change.weight])
        if found is None:
            return None
        counts.append(found)
    pairs = ", ".join(f"{b or 'no'} in place of {a}" for a, b in dict.fromkeys(counts))
    text = f"the moments are corrected as after {pairs} updates"
    if all(not second for _, second in counts):
        return "bias_not_corrected", "the bias of the moments is not corrected"
    return "other_optimizer", text


def _counts(
    settings: Mapping[str, Any], change: Change, states: Sequence[Change]
) -> tuple[int, int] | None:
    """Returns the counts of updates in both trainings, 0 for no correction; None if unknown."""
    arrays = [dense(x.after[0]) for x in states if np.shape(x.after[0]) == change.after[0].shape]
    for second in arrays:
        for first in arrays:
            if first is second or np.any(second < 0) or not norm(first):
                continue
            moments = _Moments(dense(change.before[0]), first, second, change.by)
            found = [_count(settings, moments, which) for which in (0, 1)]
            if None not in found and found[0] and found[0] != found[1]:
                return int(found[0]), int(found[1] or 0)
    return None


def _count(settings: Mapping[str, Any], moments: _Moments, which: int) -> int | None:
    by = moments.by[which]
    step = max(by.size // _SAMPLE, 1)
    weight, first, second, few_by = (
        array.ravel()[::step] for array in (moments.weight, moments.first, moments.second, by)
    )
    few = _Moments(weight, first, second, [few_by])
    fitting = [number for number in range(_MOST) if _fits(settings, few, few.by[0], number)]
    # Updates far from the first have nearly no correction.
    is_known = 0 in fitting[:1] or len(fitting) == 1
    return fitting[0] if is_known and _fits(settings, moments, by, fitting[0]) else None


def _fits(settings: Mapping[str, Any], moments: _Moments, by: np.ndarray, number: int) -> bool:
    return norm(_update(settings, moments, number) - by) <= _CLOSE * norm(by)


def _update(settings: Mapping[str, Any], moments: _Moments, number: int) -> np.ndarray:
    rate, decay = settings["learning_rate"], settings.get("weight_decay") or 0.0
    left = [1 - settings[beta] ** number if number else 1.0 for beta in ("beta_1", "beta_2")]
    root = np.sqrt(moments.second / left[1]) + settings["epsilon"]
    moved = rate / left[0] * moments.first / np.where(root == 0, 1.0, root)
    return np.asarray(-rate * decay * moments.weight - moved)
