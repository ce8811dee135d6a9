"""Compares two traces step by step and array by array."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from app.verification.difference import Difference
from app.verification.measurement import Where
from app.verification.split import KINDS_OF_A_SHARD
from app.verification.trace import KINDS, Trace, have_same_bits


@dataclasses.dataclass(frozen=True)
class PairDifference:
    """The difference of one array in two trainings after the same number of steps.

    Includes rounding of earlier steps and its effect on the training.

    Attributes:
        step: step number from 0, before the first step.
        kind: a key of `trace.KINDS`.
        tensor: name of the tensor.
        replica_id: replica with the largest difference; 0 for values that all replicas share.
        absolute: largest difference of two elements.
        relative: `absolute` over the largest magnitude in either array.
        ulps: `absolute` in ULPs of float32.
        identical: whether the arrays of all replicas are bitwise identical in both.
    """

    step: int
    kind: str
    tensor: str
    replica_id: int
    absolute: float
    relative: float
    ulps: int
    identical: bool


def compare_traces(first: Trace, second: Trace) -> list[PairDifference]:
    """Compares all values that two trainings have in common.

    For different numbers of replicas, these are the sum of the replicas' losses and the values that
    all replicas share.
    """
    differences = []
    same_before: set[str] = set()  # Weights that were identical after the previous step.
    for step in range(min(first.num_steps, second.num_steps) + 1):
        per_kind: dict[str, list[PairDifference]] = {}
        same: set[str] = set()
        for kind in sorted(KINDS, key=lambda kind: kind == "updates"):  # They follow from weights.
            known = same & same_before if kind == "updates" else set()
            compared = [
                _same((step, kind, tensor, 0))
                if tensor in known
                else _worst(first, second, (step, kind, tensor, 0))
                for tensor in first.tensors(step, kind)
            ]
            per_kind[kind] = [difference for difference in compared if difference]
            if kind == "weights":
                same = {d.tensor for d in per_kind[kind] if d.identical}
        differences += [difference for kind in KINDS for difference in per_kind[kind]]
        same_before = same
    return differences


def _same(where: Where) -> PairDifference:
    return PairDifference(*where, 0.0, 0.0, 0, identical=True)


def _worst(first: Trace, second: Trace, where: Where) -> PairDifference | None:
    """Compares an array of all replicas; returns None if there is nothing to compare."""
    step, kind, tensor, _ = where
    per_replica = [
        _difference((step, kind, tensor, replica_id), *arrays)
        for replica_id, *arrays in _in_common(first, second, step, kind, tensor)
    ]
    if not per_replica:
        return None
    worst = max(per_replica, key=lambda d: (np.isnan(d.absolute), d.absolute))
    identical = all(difference.identical for difference in per_replica)
    return dataclasses.replace(worst, identical=identical)


def first_sums_apart(first: Trace, second: Trace) -> float:
    """Returns the difference of the summed gradients of the first step in two trainings.

    Returns:
        ‖first − second‖ / ‖first‖ over all tensors.
    """
    squares = np.zeros(2)
    for tensor in first.tensors(1, "sums"):
        a, b = (trace.read(1, "sums", 0, tensor).astype(np.float64) for trace in (first, second))
        squares += np.sum((a - b) ** 2), np.sum(a**2)
    return float(np.sqrt(squares[0] / squares[1]))


def _in_common(first: Trace, second: Trace, step: int, kind: str, tensor: str) -> Iterator[tuple]:
    """Yields a replica and the arrays of both trainings for everything comparable."""
    traces = first, second
    if kind not in KINDS_OF_A_SHARD:
        replicas = {r for trace in traces for r in trace.replicas(step, kind, tensor)}
    elif first.num_shards == second.num_shards:
        replicas = set(range(first.num_shards))
    else:
        replicas = set()
        if kind == "loss":
            yield 0, *(_total(trace, step) for trace in traces)
    for replica_id in sorted(replicas):
        yield replica_id, *(trace.read(step, kind, replica_id, tensor) for trace in traces)


def _difference(where: Where, a: np.ndarray, b: np.ndarray) -> PairDifference:
    if have_same_bits(a, b):
        return _same(where)
    if where[1] == "examples":
        wrong = int(np.sum(a != b)) if a.shape == b.shape else max(len(a), len(b))
        return PairDifference(*where, float(wrong), wrong / max(1, len(a)), 0, identical=False)
    apart = Difference.between(a, b)
    return PairDifference(*where, apart.absolute, apart.relative, apart.ulps, identical=False)


def _total(trace: Trace, step: int) -> np.ndarray:
    parts = [trace.read(step, "loss", r, "loss") for r in range(trace.num_shards)]
    return np.asarray(np.sum(parts, axis=0, dtype=np.float64))
