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

    Args:
        times: for each step and replica. The first step is left out: it compiles.
        replica_weights: sizes of the replicas' shards in proportion to each other, as which their
            times are expected; empty for equal ones.
    """
    weights = replica_weights or [1] * len(times[0] if times else ())
    mean = sum(weights) / max(1, len(weights))
    steps = [
        [(sec * mean / w, cpu * mean / w) for (sec, cpu), w in zip(step, weights, strict=True)]
        for step in times[1:]
    ]
    if len(times) < MIN_STRAGGLER_STEPS or len(steps[0]) < 2:
        return None
    for replica_id in range(len(steps[0])):
        last_of_others = [max(t for r, t in enumerate(s) if r != replica_id) for s in steps]
        if all(map(_is_waited_for, (step[replica_id] for step in steps), last_of_others)):
            waits = [s[replica_id][0] - o[0] for s, o in zip(steps, last_of_others, strict=True)]
            works = [sec for sec, _ in last_of_others]
            return Straggler(replica_id, statistics.median(waits), statistics.median(works))
    return None


def _is_waited_for(sent: SendTime, last_of_others: SendTime) -> bool:
    wait, work = sent[0] - last_of_others[0], last_of_others[0]
    busy = sent[1] - last_of_others[1]
    if wait < _SHORTEST_WAIT_SEC:
        return False
    return wait > _LONG_WAIT * work or (wait > _IDLE_WAIT * work and busy < _IDLE * wait)
