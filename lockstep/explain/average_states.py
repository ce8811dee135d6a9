"""Explains optimizer state that is a moving average of weights: A' = k · A + (1 − k) · weight."""

from typing import NamedTuple

import numpy as np

from lockstep.explain.solve import solve
from lockstep.numeric.arrays import Named, norm

_CLOSE = 1e-5  # Relative to the average; of float32.
_MOST = 16  # Updates of an average in one step.


class State(NamedTuple):
    """State of weights, by their names, and the weights.

    Attributes:
        old: the state before the step, the same in both trainings.
        first, second: after it.
        weights: the weights before the step.
        first_weights, second_weights: after it.
    """

    old: Named
    first: Named
    second: Named
    weights: Named
    first_weights: Named
    second_weights: Named


def why_average(state: State) -> tuple[str, str] | None:
    """Returns cause and sentence of averages that follow other values, or too often."""
    kept = _decay(state.old, state.first, state.first_weights)
    if kept is not None and _CLOSE < kept < 1:
        return _with_decay(state, kept)
    # The weights that the reference averages may be replaced by the average.
    kept = _decay(state.old, state.second, state.weights)
    if kept is not None and 0 < kept < 1 and _decay(state.old, state.first, state.weights) is None:
        text = f"averages with a decay of {kept:.4g} follow the weights before the step"
        return "stale_average", text
    return None


def _with_decay(state: State, kept: float) -> tuple[str, str] | None:
    text = f"averages of weights with a decay of {kept:.4g}"
    if _are(state.second, state.old, kept, state.weights):
        return "stale_average", f"{text} follow the weights before the step"
    for times in range(2, _MOST + 1):
        if _are(state.second, state.old, kept**times, state.second_weights):
            return "doubled_average", f"{text} are updated {times} times in this step"
    other = _decay(state.old, state.second, state.second_weights)
    if other is not None:
        return "other_average_decay", f"{text} have a decay of {other:.4g}"
    return None


def _decay(old: Named, new: Named, weights: Named) -> float | None:
    """Returns the decay with which state follows weights; None if it does not."""
    apart = {name: old[name] - weights[name] for name in old}
    if not any(map(np.any, apart.values())):
        return None
    kept, known = solve({name: new[name] - weights[name] for name in new}, [apart])
    decay = float(kept[0])
    is_known = known.all() and np.isfinite(decay) and abs(decay - 1) > _CLOSE
    return decay if is_known and _are(new, old, decay, weights) else None


def _are(new: Named, old: Named, kept: float, weights: Named) -> bool:
    """Returns whether state is the average, to what float32 keeps of what it changes by."""

    def is_near(name: str) -> bool:
        value = kept * old[name] + (1 - kept) * weights[name]
        size = norm(old[name]) + norm(weights[name])
        moved = norm(new[name] - old[name])
        return norm(new[name] - value) <= min(_CLOSE * size, max(1e-3 * moved, 1e-7 * size))

    return all(map(is_near, new))
