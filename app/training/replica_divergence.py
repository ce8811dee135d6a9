"""The replica divergence check: compares the copies of the weights."""

import dataclasses
import hashlib
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from app.runtime.errors import ReplicaDivergenceError
from strategies.base import Strategy


@dataclasses.dataclass(frozen=True)
class ReplicaDivergence:
    """How far apart what each replica keeps for itself is, as BatchNorm's moving statistics are.

    Attributes:
        tensor: where it is largest, "" where all replicas hold the same bits.
        absolute: the largest difference between two replicas there.
    """

    tensor: str
    absolute: float


def check_replica_divergence(strategy: Strategy) -> ReplicaDivergence:
    """Compares a hash of each variable over all copies of the weights.

    Trainable variables and the optimizer state have to be bitwise identical in every copy.

    Raises:
        ReplicaDivergenceError: they are not; it names the tensor and the replicas.
    """
    copies = strategy.copies()
    own = {f"model/{v.path}" for v in strategy.model.variables if not v.trainable}
    divergence = ReplicaDivergence("", 0.0)
    per_copy_hashes = strategy.gather([_hash(copy.values()) for copy in copies])
    for name, hashes in zip(
        strategy.variable_names, zip(*per_copy_hashes, strict=True), strict=True
    ):
        groups: dict[bytes, list[int]] = {}
        for copy_id, digest in enumerate(hashes):
            groups.setdefault(digest.tobytes(), []).append(copy_id)
        if len(groups) == 1:
            continue
        # Every worker knows the hashes: all of them get here for the same tensor.
        arrays = [array for (array,) in strategy.gather([[copy[name].numpy()] for copy in copies])]
        apart = float(np.max(np.ptp(np.asarray(arrays, np.float64), axis=0)))
        if name not in own:
            raise ReplicaDivergenceError(_describe(name, list(groups.values()), apart))
        if np.isnan(apart) or apart > divergence.absolute:
            divergence = ReplicaDivergence(name.removeprefix("model/"), apart)
    return divergence


def _hash(variables: Iterable[tf.Variable]) -> list[np.ndarray]:
    """Returns 32 bytes for each variable."""
    digests = [hashlib.sha256(variable.numpy().tobytes()).digest() for variable in variables]
    return [np.frombuffer(digest, np.uint8) for digest in digests]


def _describe(name: str, groups: list[list[int]], apart: float) -> str:
    largest = max(groups, key=len)
    others = [replica for group in groups if group is not largest for replica in group]
    who = f"replica {', '.join(map(str, sorted(others)))}"
    return (
        f"{name.partition('/')[2]} on {who} is not what replica"
        f" {', '.join(map(str, largest))} hold{'s' * (len(largest) == 1)}, by {apart:.3g} — after"
        " each step all replicas have to hold the same bits; run verify with the same flags to"
        " find the first mismatch"
    )
