"""Explains arrays that differ by a multiple of the weights: another decay, whatever the rule."""

from collections.abc import Mapping

import numpy as np

from lockstep.answer.text import count
from lockstep.numeric.arrays import EPS

_CLOSE = 1e-3  # Relative to the largest element.
_LEAST = 8  # Elements that are clearly a multiple of the weight.
_CLEAR = 4  # Bounds.

Decayed = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # See `other_decay`.


def other_decay(arrays: Mapping[str, Decayed], what: str) -> tuple[str, str, list[str]] | None:
    """Returns cause, sentence and names of arrays that contain another multiple of the weight.

    A script may decay other elements than the reference, as of a shard: each element has one number
    times its weight in addition, or lacks it, or is right.

    Args:
        arrays: name → the weight before the step, what it is in the reference and in the checked
            training, such as its change or a gradient, and how far rounding can move it.
        what: noun of these arrays.
    """
    weights, apart, bounds = dict[str, np.ndarray](), dict[str, np.ndarray](), {}
    for name, (weight, first, second, slack) in arrays.items():
        if not weight.shape == first.shape == second.shape:
            return None
        weights[name], apart[name] = weight, second - first
        largest = max(np.max(np.abs(each), initial=0) for each in (first, second))
        bounds[name] = _CLOSE * largest + EPS * np.abs(weight) + slack
    far = {name: np.abs(each) > bounds[name] for name, each in apart.items()}
    # Elements that are 0 tell nothing.
    ratios = [
        apart[name][where] / np.where(weights[name][where], weights[name][where], np.nan)
        for name, where in far.items()
    ]
    known = np.concatenate(ratios) if ratios else np.zeros(0)
    if not known.size or not np.isfinite(known).all():
        return None
    times = float(np.median(np.abs(known)))
    num_clear = 0
    for name, where in far.items():
        value = times * weights[name] * np.sign(apart[name] * weights[name])
        if np.any(np.abs(apart[name] - value)[where] > bounds[name][where]):
            return None
        num_clear += int(np.sum(where & (np.abs(value) > _CLEAR * bounds[name])))
    wrong = [name for name, where in far.items() if np.any(where)]
    num = sum(int(np.sum(each)) for each in far.values())
    num_all = sum(each.size for each in far.values())
    if num_clear < max(_LEAST, num / 2):
        return None
    text = f"{what} of {num} of {num_all} elements, in {count('weight', len(wrong))},"
    text += f" differ from those of the first recording by {times:.4g} times the weight:"
    of_more = sum(int(np.sum(ratio > 0)) for ratio in ratios), "are larger"
    parts = [f"{some} {how}" for some, how in (of_more, (num - of_more[0], "are smaller")) if some]
    text += " " + ", and ".join(parts)
    return "other_weight_decay", text, wrong
