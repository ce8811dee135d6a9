"""The replica divergence check: compares the copies of the weights."""

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tensorflow as tf

from app.runtime.errors import ReplicaDivergenceError
from strategies.base import Strategy
from strategies.copies import Variables


@dataclasses.dataclass(frozen=True)
class ReplicaDivergence:
    """The largest difference of per-replica variables such as BatchNorm's moving statistics.

    Attributes:
        tensor: variable with the largest difference; "" if all replicas are bitwise identical.
        absolute: largest difference between two replicas.
    """

    tensor: str
    absolute: float


def check_replica_divergence(strategy: Strategy) -> ReplicaDivergence:
    """Compares a hash of each variable over all copies of the weights.

    Trainable variables and the optimizer state must be bitwise identical in every copy.

    Raises:
        ReplicaDivergenceError: they differ; the message names the tensor and the replicas.
    """
    statistics = set(strategy.states.statistics_names)
    copies = [
        {name: variable for name, variable in copy.items() if name not in statistics}
        for copy in strategy.copies()
    ]
    for name, groups, apart in _differences(strategy, copies):
        raise ReplicaDivergenceError(_describe(name, groups, apart))
    divergence = ReplicaDivergence("", 0.0)
    for name, _, apart in _differences(strategy, strategy.states.shard_statistics()):
        if np.isnan(apart) or apart > divergence.absolute:
            divergence = ReplicaDivergence(name.removeprefix("model/"), apart)
    return divergence


def _differences(
    strategy: Strategy, per_item_variables: Sequence[Variables]
) -> Iterator[tuple[str, list[list[int]], float]]:
    """Yields each variable that is not bitwise identical in all copies, or shards.

    Yields:
        Its name, the groups of items with identical values, and the largest difference.
    """
    names = list(per_item_variables[0])
    per_item_hashes = strategy.states.gather([_hash(v.values()) for v in per_item_variables])
    different: dict[str, list[list[int]]] = {}
    for name, hashes in zip(names, zip(*per_item_hashes, strict=True), strict=True):
        groups: dict[bytes, list[int]] = {}
        for item_id, digest in enumerate(hashes):
            groups.setdefault(digest.tobytes(), []).append(item_id)
        if len(groups) > 1:
            different[name] = list(groups.values())
    if different:  # Every worker knows the hashes, so that all of them get here.
        own = [[variables[name].numpy() for name in different] for variables in per_item_variables]
        per_item_arrays = strategy.states.gather(own)
        for index, (name, groups_of) in enumerate(different.items()):
            arrays = np.asarray([arrays[index] for arrays in per_item_arrays], np.float64)
            yield name, groups_of, float(np.max(np.ptp(arrays, axis=0)))


def _hash(variables: Iterable[tf.Variable]) -> list[np.ndarray]:
    """Returns 32 bytes for each variable."""
    digests = [hashlib.sha256(variable.numpy().tobytes()).digest() for variable in variables]
    return [np.frombuffer(digest, np.uint8) for digest in digests]


def _describe(name: str, groups: list[list[int]], apart: float) -> str:
    largest = max(groups, key=len)
    differing = [replica for group in groups if group is not largest for replica in group]
    differing_ids = ", ".join(map(str, sorted(differing)))
    return (
        f"{name.partition('/')[2]} on replica {differing_ids} differs from replica"
        f" {', '.join(map(str, largest))} by {apart:.3g}, but must be bitwise identical; run"
        " verify with the same flags to find the first mismatch"
    )
