"""Compares the moving statistics of BatchNorm after a step in two recordings."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.records.case_record import BY_DESIGN, FAULT
from app.verification.recordings.recorded_step import STATISTIC, Named, RecordedStep
from app.verification.recordings.step_pair import StepPair
from app.verification.recordings.trace_arrays import distance, factor, norm, relative_distances
from app.verification.recordings.trace_finding import TraceFinding

_CLOSE = 1e-4


def compare_statistics(pair: StepPair, allowed: float) -> list[TraceFinding] | None:
    """Compares the statistics after a step that starts from the same ones.

    Args:
        pair: the step, with equal states before it.
        allowed: relative difference that rounding can cause, in the change of a statistic.

    Returns:
        The findings; None if a recording has no statistics.
    """
    first, second = pair.states("after")
    before, _ = pair.states("before")
    names = [
        name
        for name in pair.first.state("after", 0, STATISTIC)
        if name in second and first[name].dtype.kind == "f"
    ]
    if not names:
        return None
    changes = [first[n].astype(np.float64) - before[n] for n in names]
    others = [second[n].astype(np.float64) - before[n] for n in names]
    apart = relative_distances(others, changes)
    wrong = [name for name, far in zip(names, apart, strict=True) if far > allowed]
    if not wrong:
        return []
    status, cause, text = _why(pair, names, wrong, changes, others)
    return [
        TraceFinding(
            *("statistics", status, cause, text, (pair.number,)),
            tensors=tuple(wrong),
            distance=max(apart),
            allowed=allowed,
        )
    ]


def _why(
    pair: StepPair,
    names: Sequence[str],
    wrong: Sequence[str],
    changes: Sequence[np.ndarray],
    others: Sequence[np.ndarray],
) -> tuple[str, str, str]:
    """Returns status and cause of other statistics, and a sentence."""
    scale = factor(others, changes)
    if _close(others, [scale * change for change in changes]):
        text = f"each statistic changes {scale:.4g} times as much as in the first recording"
        return FAULT, "other_batch_norm_momentum", text
    if (found := _unbiased(pair, wrong)) is not None:
        return found
    for step, which in ((pair.second, "second"), (pair.first, "first")):
        if step.trace.num_replicas > 1 and _differ(step):
            text = f"each replica of the {which} recording has the statistics of its own examples"
            return BY_DESIGN, "local_statistics", text
    return FAULT, "other_statistics", f"{len(wrong)} of {len(names)} statistics differ"


def _unbiased(pair: StepPair, wrong: Sequence[str]) -> tuple[str, str, str] | None:
    """Explains variances by n / (n - 1), possibly with another momentum."""
    first, second = pair.states("after")
    before, _ = pair.states("before")
    weights = [
        _weight_of_batch(pair.first.trace.layers),
        _weight_of_batch(pair.second.trace.layers),
    ]
    if weights[0] is None or weights[1] is None:
        return None
    ratios = []
    for name in wrong:
        batch = [
            (after[name].astype(np.float64) - (1 - weight) * before[name]) / weight
            for after, weight in ((first, weights[0]), (second, weights[1]))
        ]
        ratio = factor([batch[1]], [batch[0]])
        if distance(batch[1], ratio * batch[0], max(norm(batch[1]), 1e-30)) > 20 * _CLOSE:
            return None
        ratios.append(ratio)
    if not all(0.4 < ratio < 2.1 for ratio in ratios) or all(abs(r - 1) < _CLOSE for r in ratios):
        return None
    largest = max(ratios, key=lambda ratio: abs(ratio - 1))
    which = "second" if largest > 1 else "first"
    text = (
        f"the variance of a batch is up to {max(largest, 1 / largest):.6g} times as large in the"
        f" {which} recording: n / (n - 1), the unbiased one"
    )
    return BY_DESIGN, "unbiased_variance", text


def _weight_of_batch(layers: Sequence[Mapping[str, Any]]) -> float | None:
    """Returns with which weight BatchNorm adds the statistics of a batch; None if not known."""
    for layer in layers:
        if "BatchNorm" in str(layer.get("class")) and isinstance(layer.get("momentum"), float):
            momentum = layer["momentum"]
            return 1 - momentum if layer["class"] == "BatchNormalization" else momentum
    return None


def _differ(step: RecordedStep) -> bool:
    states: list[Named] = [step.state("after", r, STATISTIC) for r in step.replicas]
    return any(
        not np.array_equal(states[0][name], other[name]) for other in states[1:] for name in other
    )


def _close(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray]) -> bool:
    return max(relative_distances(actual, expected)) < _CLOSE
