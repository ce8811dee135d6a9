"""Which replica keeps the others waiting."""

import dataclasses
import statistics
from collections.abc import Sequence

_MARGIN = 1.25


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


def find_straggler(times: Sequence[Sequence[float]]) -> Straggler | None:
    """Finds a replica for which the others waited, in every step, longer than they had worked.

    The margin is wide because logical devices share their cores: with one more replica than there
    are cores, the last is late by as much as the work of one.

    Args:
        times: for each step and replica, seconds from the start of the step until it sent its
            gradients. The first step is left out: it compiles.
    """
    steps = times[1:]
    if not steps or len(steps[0]) < 2:
        return None
    for replica_id in range(len(steps[0])):
        works = [max(t for r, t in enumerate(step) if r != replica_id) for step in steps]
        waits = [step[replica_id] - work for step, work in zip(steps, works, strict=True)]
        if all(wait > _MARGIN * work for wait, work in zip(waits, works, strict=True)):
            return Straggler(replica_id, statistics.median(waits), statistics.median(works))
    return None
