"""Which replica keeps the others waiting."""

import dataclasses
import statistics
from collections.abc import Sequence

from app.config.fault import MIN_STRAGGLER_STEPS

# Seconds, and seconds of processor time, from the start of a step until a replica sent its
# gradients.
SendTime = tuple[float, float]

# The others wait longer than they worked; or a good part of that, while the processor has nothing
# to do. Logical devices share their cores: with one more replica than there are cores, the last is
# late by as much as the work of one, but then the cores are busy.
_LONG_WAIT, _IDLE_WAIT, _IDLE = 1.25, 0.25, 0.25
_SHORTEST_WAIT_SEC = 0.01


@dataclasses.dataclass(frozen=True)
class Straggler:
    """A replica for which all others waited in every step.

    Attributes:
        replica_id: which.
        wait_sec: from when the last of the others had sent its gradients, median over the steps.
        work_sec: what the others took from the start of the step, median over the steps.
    """

    replica_id: int
    wait_sec: float
    work_sec: float


def find_straggler(
    times: Sequence[Sequence[SendTime]], replica_weights: Sequence[int] = ()
) -> Straggler | None:
    """Finds a replica for which the others had to wait in every step, by a wide margin.

    Where shards have unequal sizes, it is one by its times as they are, and by those per example,
    too: a larger shard takes longer, and a smaller one not as much less as it has fewer examples.

    Args:
        times: for each step and replica. The first step is left out: it compiles.
        replica_weights: sizes of the replicas' shards in proportion to each other; empty for equal
            ones.
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
