"""Do the replicas still hold the same?"""

import dataclasses
import hashlib

import numpy as np

from app.errors import DriftError
from strategies.base import Strategy


@dataclasses.dataclass(frozen=True)
class Drift:
    """How far apart what each replica keeps for itself is, as BatchNorm's moving statistics are.

    Attributes:
        tensor: where it is largest, "" where all replicas hold the same bits.
        absolute: the largest difference between two replicas there.
    """

    tensor: str
    absolute: float


def check_replicas(strategy: Strategy) -> Drift:
    """Compares a hash of each variable on each replica.

    What is trained, and what the optimizer keeps, have to be the same bits everywhere.

    Raises:
        DriftError: they are not; it names the tensor and the replicas.
    """
    names = strategy.variable_names
    own = {
        f"model/{v.path}" for v in strategy.model.variables if not v.trainable
    }  # What replicas may hold each for itself.
    drift = Drift("", 0.0)
    for name, copies in zip(names, zip(*strategy.replica_variables(), strict=True), strict=True):
        arrays = [variable.numpy() for variable in copies]
        groups: dict[str, list[int]] = {}
        for replica_id, array in enumerate(arrays):
            groups.setdefault(hashlib.sha256(array.tobytes()).hexdigest(), []).append(replica_id)
        if len(groups) == 1:
            continue
        apart = float(np.max(np.ptp(np.asarray(arrays, np.float64), axis=0)))
        if name not in own:
            raise DriftError(_describe(name, list(groups.values()), apart))
        if np.isnan(apart) or apart > drift.absolute:
            drift = Drift(name.removeprefix("model/"), apart)
    return drift


def _describe(name: str, groups: list[list[int]], apart: float) -> str:
    largest = max(groups, key=len)
    others = [replica for group in groups if group is not largest for replica in group]
    who = f"replica {', '.join(map(str, sorted(others)))}"
    return (
        f"{name.partition('/')[2]} on {who} is not what replica"
        f" {', '.join(map(str, largest))} hold{'s' * (len(largest) == 1)}, by {apart:.3g} — after"
        " each step all replicas have to hold the same bits; run verify with the same flags to"
        " find the first false step"
    )
