"""Predicts what known faults would leave in a recording."""

from collections.abc import Callable, Iterable
from typing import TypeVar

from lockstep.numeric.arrays import Named

Hypothesis = tuple[str, str, Callable[[], Named]]  # Cause, text, and the arrays that it predicts.
Why = TypeVar("Why", bound=tuple)


def explain(names: Iterable[str], why: Callable[[str], Why]) -> dict[Why, list[str]]:
    """Returns explanation → names of the arrays that it explains."""
    groups: dict[Why, list[str]] = {}
    for name in names:
        groups.setdefault(why(name), []).append(name)
    return groups


def predicted_by(
    hypotheses: Iterable[Hypothesis], names: Iterable[str], fits: Callable[[str, Named], bool]
) -> dict[str, tuple[str, str, Named]]:
    """Returns name → cause, text and prediction, for the arrays that a hypothesis predicts.

    Args:
        hypotheses: the most certain first.
        names: names of the arrays; no prediction is computed after all are explained.
        fits: whether an array is as predicted, and the right one is not.
    """
    found: dict[str, tuple[str, str, Named]] = {}
    left = list(names)
    for cause, text, predict in hypotheses if left else ():
        predicted = predict()
        found |= {name: (cause, text, predicted) for name in left if fits(name, predicted)}
        left = [name for name in left if name not in found]
        if not left:
            break
    return found
