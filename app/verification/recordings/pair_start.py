"""Compares the states before a step in two recordings."""

import numpy as np

from app.verification.recordings.step_pair import StepPair
from app.verification.recordings.trace_arrays import norm, relative_distances
from app.verification.recordings.trace_finding import TraceFinding, fault

_LARGE = 100  # Minimum number of elements for a conclusion from the spread of initial values.
_OTHER_SPREAD = 0.2  # Larger than random deviations for that number.


def compare_starts(pair: StepPair, *, is_first: bool) -> list[TraceFinding] | None:
    """Compares weights and statistics before a step.

    Args:
        pair: the step.
        is_first: whether it is the first step; later states may differ by rounding.

    Returns:
        The findings; None if differences are no fault: later steps that were not replayed.
    """
    if pair.starts_equally:
        return []
    distance = pair.start_distance()
    if pair.second.trace.replayed is not None:
        text = "the step was to start from the state of the first recording, and does not"
        return [fault("start", "not_replayed", text, pair.number, distance=distance)]
    if not is_first:
        return None
    first, second = pair.states("before")
    names = [n for n in first if relative_distances([second[n]], [first[n]])[0] > 1e-7]
    spread = [
        (name, float(np.std(first[name])), float(np.std(second[name])))
        for name in names
        if first[name].size >= _LARGE
    ]
    others = [each for each in spread if abs(each[2] - each[1]) > _OTHER_SPREAD * max(each[1:])]
    if others:
        name, a, b = max(
            others, key=lambda each: abs(np.log((each[2] + 1e-30) / (each[1] + 1e-30)))
        )
        text = (
            f"the initial values of {len(names)} of {len(first)} variables come from another"
            f" distribution: {name} has standard deviation {a:.4g} in the first recording and"
            f" {b:.4g} in the second"
        )
        cause = "other_initialiser"
    else:
        text = f"{len(names)} of {len(first)} variables have other initial values"
        cause = "other_initial_weights"
        if all(not norm(first[name]) or not norm(second[name]) for name in names):
            cause, text = "other_initialiser", f"{text}: zero in one recording"
    return [fault("start", cause, text, pair.number, tensors=tuple(names), distance=distance)]
