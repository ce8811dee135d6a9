"""Compares the loss of a step in two recordings."""

import itertools
from collections.abc import Sequence

import numpy as np

from app.verification.recordings.recorded_step import RecordedStep
from app.verification.recordings.step_pair import StepPair
from app.verification.recordings.trace_finding import TraceFinding, fault


def compare_losses(pair: StepPair, allowed: float) -> list[TraceFinding] | None:
    """Compares the loss of the whole batch: the sum, mean or weighted mean of the replicas' losses.

    Scripts report losses in different forms, which do not affect the training: any form of one
    recording may agree with any form of the other.

    Returns:
        The findings; None if a recording has no loss.
    """
    first, second = _losses(pair.first), _losses(pair.second)
    if not first or not second:
        return None
    if any(abs(a - b) <= allowed * abs(a) for a, b in itertools.product(first, second)):
        return []
    ratio = second[0] / first[0] if first[0] else float("nan")
    sizes = {step.num_examples(0) for step in (pair.first, pair.second)} - {None, 1}
    is_sum = any(
        size and min(abs(ratio - size) / size, abs(ratio * size - 1)) < 1e-3 for size in sizes
    )
    text = f"the loss is {second[0]:.6g}, and {first[0]:.6g} in the first recording"
    cause = "other_loss_reduction" if is_sum else "other_loss"
    if is_sum:
        text += f": {ratio:.6g} times, a sum over examples in place of a mean"
    return [fault("loss", cause, text, pair.number, distance=abs(ratio - 1), allowed=allowed)]


def _losses(step: RecordedStep) -> list[float]:
    """Returns the loss of the whole batch in each form that a script may report."""
    recorded = [step.arrays("loss", replica) for replica in step.replicas]
    if not all(recorded):
        return []
    losses = [float(np.asarray(arrays[0], np.float64).sum()) for arrays in recorded if arrays]
    # Keras' second array is the regularisation, a part of the first.
    parts = [float(np.sum(arrays[1])) for arrays in recorded if arrays and len(arrays) > 1]
    found = _of_whole(step, losses)
    if len(parts) == len(losses) and any(parts):
        found += _of_whole(step, [a - b for a, b in zip(losses, parts, strict=True)])
    return found


def _of_whole(step: RecordedStep, losses: Sequence[float]) -> list[float]:
    sizes = [step.num_examples(replica) for replica in step.replicas]
    found = [float(np.mean(losses)), float(np.sum(losses))]
    known = [size for size in sizes if size]
    if len(known) == len(losses):
        found.append(float(np.average(losses, weights=known)))
    return found
