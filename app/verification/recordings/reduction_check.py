"""Checks the all-reduce of a recorded step, and explains a wrong sum."""

import itertools
from collections.abc import Sequence

import numpy as np

from app.verification.recordings.recorded_step import CLIPPED_FIRST, Named, RecordedStep
from app.verification.recordings.trace_arrays import (
    EPS,
    TINY,
    all_finite,
    factor,
    relative_distances,
    same_bits,
)
from app.verification.recordings.trace_finding import TraceFinding, fault

_BFLOAT16_EPS = 2.0**-8
_CLOSE = 1e-5  # Relative distance up to which a hypothesis explains a sum.


def check_reduction(step: RecordedStep) -> list[TraceFinding] | None:
    """Compares the values that each replica receives with the sum or mean of the sent values.

    The bound is that of a float32 sum in any order: R · eps · Σ |term|.

    Returns:
        The findings; None if the sent values are not recorded.
    """
    sent = step.gradients_of_all("clipped" if step.trace.order == CLIPPED_FIRST else "raw")
    if sent is None or not all(all_finite(list(own.values())) for own in sent):
        return None
    received = step.gradients_of_all("sums")
    if received is None:
        return _without_reduction(step, sent)
    if not step.trace.reduction:
        return None
    if apart := _receive_their_own(sent, received):
        text = f"each replica receives what it sends itself, of {len(apart)} gradients"
        return [fault("all-reduce", "not_all_reduced", text, step.number, tensors=tuple(apart))]
    found = []
    for replica in step.replicas:
        own = received[replica]
        wrong = [
            name
            for name in own
            if name in sent[0]
            and not _is_sum(own[name], [each[name] for each in sent], step.trace.reduction)
        ]
        if wrong:
            found.append(_explain(step, replica, wrong, sent, own))
    return found


def _receive_their_own(sent: Sequence[Named], received: Sequence[Named]) -> list[str]:
    """Returns the names of gradients that differ between replicas and are the sum on none."""
    return [
        name
        for name in received[0]
        if all(name in own for own in sent)
        and not all(same_bits(own[name], sent[0][name]) for own in sent)
        and all(same_bits(a[name], b[name]) for a, b in zip(sent, received, strict=True))
    ]


def _is_sum(received: np.ndarray, parts: Sequence[np.ndarray], reduction: str) -> bool:
    terms = [part.astype(np.float64) for part in parts]
    divisor = len(terms) if reduction == "mean" else 1
    bound = (len(terms) + 1) * EPS * np.sum(np.abs(terms), axis=0) / divisor + TINY
    return bool(np.all(np.abs(received - np.sum(terms, axis=0) / divisor) <= bound))


def _without_reduction(step: RecordedStep, sent: Sequence[Named]) -> list[TraceFinding] | None:
    """Returns findings if no all-reduce was recorded: replicas that apply what they sent."""
    applied = [step.applied(replica) for replica in step.replicas]
    if any(gradients is None for gradients in applied):
        return None
    names = list(sent[0])
    own = [
        name
        for name in names
        if not all(same_bits(sent[0][name], other[name]) for other in sent[1:])
        and all(
            name in gradients and _is_multiple(gradients[name], arrays[name])
            for gradients, arrays in zip(applied, sent, strict=True)
            if gradients is not None
        )
    ]
    if not own:
        return None
    return [
        fault(
            "all-reduce",
            "not_all_reduced",
            "each replica applies the gradient of its own examples: no all-reduce of"
            f" {len(own)} of {len(names)} gradients was seen",
            step.number,
            tensors=tuple(own),
        )
    ]


def _is_multiple(applied: np.ndarray, sent: np.ndarray) -> bool:
    """Returns whether a gradient is the sent one, clipped or not."""
    scale = factor([applied], [sent])
    if not np.isfinite(scale):
        return not np.any(applied)
    return relative_distances([applied], [scale * sent.astype(np.float64)])[0] < _CLOSE


def _explain(
    step: RecordedStep,
    replica: int,
    wrong: Sequence[str],
    sent: Sequence[Named],
    received: Named,
) -> TraceFinding:
    """Describes the sum that a replica received instead."""
    actual = [received[name] for name in wrong]
    terms = [[own[name].astype(np.float64) for name in wrong] for own in sent]
    count, is_mean = len(terms), step.trace.reduction == "mean"

    def total(replicas: Sequence[int]) -> list[np.ndarray]:
        return [np.sum([terms[r][i] for r in replicas], axis=0) for i in range(len(wrong))]

    everyone = total(range(count))
    expected = [array / count if is_mean else array for array in everyone]
    apart = max(relative_distances(actual, expected))
    cause, text = "other_sum", f"what is received is not the {step.trace.reduction} of what is sent"
    other = everyone if is_mean else [array / count for array in everyone]
    if _explains(other, actual):
        cause = "sum_instead_of_mean" if is_mean else "mean_instead_of_sum"
        text = (
            f"what is received is the {'sum' if is_mean else 'mean'} of what {count} replicas send"
        )
    elif all(
        np.all(np.abs(a - e) <= (count + 1) * _BFLOAT16_EPS * np.abs(e).max())
        for a, e in zip(actual, expected, strict=True)
    ):
        cause, text = "reduced_precision", "what is received is rounded to fewer bits than float32"
    else:
        subsets = (
            subset
            for size in range(1, min(count, 9))
            for subset in itertools.combinations(range(count), size)
        )
        for subset in itertools.islice(subsets, 512):
            some = total(subset)
            if any(
                _explains([array / divisor for array in some], actual)
                for divisor in {1, count, len(subset)}
            ):
                missing = [r for r in range(count) if r not in subset]
                cause, text = "lost_replica", f"the gradient of replica {missing} is not in the sum"
                break
    where = {"replicas": (replica,), "tensors": tuple(wrong)}
    return fault("all-reduce", cause, text, step.number, **where, distance=apart)


def _explains(predicted: Sequence[np.ndarray], actual: Sequence[np.ndarray]) -> bool:
    return max(relative_distances(actual, predicted)) < _CLOSE
