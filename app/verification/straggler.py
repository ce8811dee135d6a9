"""Detects a straggler: a replica that the others wait for."""

import dataclasses
import statistics
from collections.abc import Sequence

from app.options.fault import MIN_STRAGGLER_STEPS

# Seconds, and seconds of processor time, from the start of a step until a replica sent its
# gradients.
SendTime = tuple[float, float]

# The others wait longer than they worked, or a large part of that while the processor is idle.
# Logical devices share cores: with one more replica than cores, the last one is late by the work of
# one replica, but the cores are then busy.
_LONG_WAIT, _IDLE_WAIT, _IDLE = 1.25, 0.25, 0.25
_SHORTEST_WAIT_SEC = 0.01


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A replica that all others waited for in every step.

    Attributes:
        replica_id: id of the replica.
        wait_sec: time since the last of the others had sent its gradients, median over the steps.
        work_sec: time of the others from the start of the step, median over the steps.
    """

    replica_id: int
    wait_sec: float
    work_sec: float


def find_straggler(
    times: Sequence[Sequence[SendTime]], replica_weights: Sequence[int] = ()
) -> Straggler | None:
    """Finds a replica that the others had to wait for in every step, by a wide margin.

    With unequal shards, it must be late both in its times and in its times per example: a larger
    shard takes longer, but not in proportion to its examples.

    Args:
        times: times for each step and replica. The first step is ignored because it compiles.
        replica_weights: relative sizes of the replicas' shards; empty for equal sizes.
    """
    steps = times[1:]
    if len(times) < MIN_STRAGGLER_STEPS or len(steps[0]) < 2:
        return None
    weights = replica_weights or [1] * len(steps[0])
    mean = sum(weights) / len(weights)
    per_example = [
        [(sec * mean / w, cpu * mean / w) for (sec, cpu), w in zip(step, weights, strict=True)]
        for step in steps
    ]
    for replica_id in range(len(weights)):
        if _is_late(replica_id, steps) and _is_late(replica_id, per_example):
            others = [_last_of_others(replica_id, step)[0] for step in steps]
            waits = [s[replica_id][0] - o for s, o in zip(steps, others, strict=True)]
            return Straggler(replica_id, statistics.median(waits), statistics.median(others))
    return None


def _is_late(replica_id: int, steps: Sequence[Sequence[SendTime]]) -> bool:
    return all(
        _is_waited_for(step[replica_id], _last_of_others(replica_id, step)) for step in steps
    )


def _last_of_others(replica_id: int, step: Sequence[SendTime]) -> SendTime:
    return max(t for r, t in enumerate(step) if r != replica_id)


def _is_waited_for(sent: SendTime, last_of_others: SendTime) -> bool:
    wait, work = sent[0] - last_of_others[0], last_of_others[0]
    busy = sent[1] - last_of_others[1]
    if wait < _SHORTEST_WAIT_SEC:
        return False
    return wait > _LONG_WAIT * work or (wait > _IDLE_WAIT * work and busy < _IDLE * wait)
