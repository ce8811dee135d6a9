"""Checks of a strategy: its all-reduce before training, its copies of the weights at each save."""

import hashlib
from collections.abc import Iterable

import numpy as np
import tensorflow as tf

from app.errors import AllReduceError, ReplicaDivergenceError
from strategies.base import Strategy


def check_all_reduce(strategy: Strategy) -> None:
    """Raises `AllReduceError` if a replica is lost or repeated; takes milliseconds.

    Replica i sends i + 1 as element i. A wrong sum is often equal on every replica, so that all
    weights stay equal and no other check detects it.
    """
    num_replicas, tensors = strategy.num_replicas, []
    if num_replicas == 1:
        return
    expected = np.arange(1.0, num_replicas + 1)
    ids = strategy.workers.local_range(num_replicas)
    for replica_id, device in zip(ids, strategy.local_devices, strict=True):
        with tf.device(device):
            sent = np.where(np.arange(num_replicas) == replica_id, expected, 0.0)
            tensors.append([tf.constant(sent, tf.float32)])
    for replica_id, (total,) in zip(ids, strategy.all_reduce(tensors), strict=True):
        got = total.numpy().astype(float)
        if np.array_equal(got, expected):
            continue
        counts, advice = got / expected, "fix its all-reduce"
        lost = ", ".join(str(r) for r, count in enumerate(counts) if count == 0)
        text = f"; replica {lost} was lost" if lost else ""
        if np.allclose(counts, counts[0]) and counts[0] not in (0, 1):
            text = f"; each replica counts {counts[0]:.3g} times"
        if strategy.algorithm != strategy.default_all_reduce():
            advice = "use --all_reduce=auto"
        raise AllReduceError(
            f"all-reduce {strategy.algorithm} of {strategy.name} on {num_replicas} replicas is"
            f" wrong: replica i sent i + 1 as element i, and replica {replica_id} got"
            f" {_shown(got)} instead of {_shown(expected)}{text}; {advice}"
        )


def _shown(numbers: np.ndarray) -> str:
    return " ".join(f"{number:g}" for number in numbers)


def check_copies(strategy: Strategy) -> None:
    """Raises `ReplicaDivergenceError` unless all copies of the weights are bitwise identical.

    So is the optimizer state. BatchNorm's moving statistics differ, as each shard has its own.
    """
    statistics = strategy.states.statistics_names
    names = [name for name in strategy.states.variable_names if name not in statistics]
    per_copy = [[copy[name] for name in names] for copy in strategy.copies()]
    per_copy_hashes = strategy.states.gather([_hashes(variables) for variables in per_copy])
    for index, name in enumerate(names):
        groups: dict[bytes, list[int]] = {}
        for copy_id, hashes in enumerate(per_copy_hashes):
            groups.setdefault(hashes[index].tobytes(), []).append(copy_id)
        if len(groups) == 1:
            continue
        # Every worker knows the hashes, so that all of them get here.
        arrays = strategy.states.gather([[variables[index].numpy()] for variables in per_copy])
        apart = float(np.max(np.ptp(np.array([a for (a,) in arrays], np.float64), axis=0)))
        largest = max(groups.values(), key=len)
        others = [copy_id for group in groups.values() if group is not largest for copy_id in group]
        raise ReplicaDivergenceError(
            f"{name.partition('/')[2]} on replica {', '.join(map(str, sorted(others)))} differs"
            f" from replica {', '.join(map(str, largest))} by {apart:.3g}, but must be bitwise"
            " identical; run verify with the same flags to find the first mismatch"
        )


def _hashes(variables: Iterable[tf.Variable]) -> list[np.ndarray]:
    """Returns 32 bytes for each variable."""
    digests = [hashlib.sha256(variable.numpy().tobytes()).digest() for variable in variables]
    return [np.frombuffer(digest, np.uint8) for digest in digests]
