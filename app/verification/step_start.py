"""Reads the state and the examples at the start of a step of a trace."""

import collections

import numpy as np

from app.verification.reference import Arrays
from app.verification.trace import Trace, hash_examples


def state_before(trace: Trace, step: int) -> Arrays:
    """Returns the state before a step: replica 0's weights, optimizer state and statistics."""
    return {
        tensor: trace.read(step - 1, kind, 0, tensor)
        for kind in ("weights", "slots", "statistics")
        for tensor in trace.tensors(step - 1, kind)
    }


def statistics_before(trace: Trace, step: int) -> list[Arrays]:
    """Returns the moving statistics of each shard before a step."""
    kind = "own statistics"
    return [
        {t: trace.read(step - 1, kind, shard_id, t) for t in trace.tensors(step - 1, kind)}
        for shard_id in range(trace.num_shards)
    ]


def find_shards(
    trace: Trace, step: int, images: np.ndarray, labels: np.ndarray
) -> tuple[list[np.ndarray], list[int]]:
    """Finds the rows of the global batch in each shard.

    However a strategy splits the batch, every example must occur once.

    Returns:
        For each shard, its rows in order; and its number of wrong examples: from another batch, or
        repeated. If any is wrong, the rows are those of an even split.
    """
    rows_of: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
    for row, example in enumerate(hash_examples(images, labels)):
        rows_of[int(example)].append(row)
    shards, wrong = [], []
    for shard_id in range(trace.num_shards):
        examples = trace.read(step, "examples", shard_id, "examples")
        rows = [
            rows_of[int(example)].popleft() if rows_of[int(example)] else None
            for example in examples
        ]
        shards.append(np.array([row for row in rows if row is not None], np.int64))
        wrong.append(rows.count(None))
    left_out = len(labels) - sum(len(shard) for shard in shards)
    if left_out or any(wrong):
        if not any(wrong):
            wrong[-1] = left_out
        return np.array_split(np.arange(len(labels)), trace.num_shards), wrong
    return shards, wrong


def rows_of_units(trace: Trace, shards: list[np.ndarray]) -> list[np.ndarray]:
    """Returns the rows of each of `trace.split.units`, from those of its shards."""
    return [np.concatenate([shards[s] for s in unit]) for unit in trace.split.units]
