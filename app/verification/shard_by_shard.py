"""Trains on one device, shard by shard, and writes a trace."""

import pathlib
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from app.verification.reference import LOSS_SCALE, Arrays, Reference, ShardResult
from app.verification.trace import Trace, TraceWriter, hash_examples
from strategies.collectives import weighted_bounds


def train_shard_by_shard(
    reference: Reference,
    batches: Iterable[tuple[np.ndarray, np.ndarray]],
    *,
    shard_weights: Sequence[int],
    path: pathlib.Path,
    on_step: Callable[[int], None] = lambda step: None,
) -> list[int]:
    """Trains on one device with BatchNorm per shard, and writes the trace to `path`.

    With BatchNorm, the number of shards is part of the training: each is normalised by its own
    statistics (`--batch_norm=average`). Here the shards are computed one after another.

    Args:
        reference: a float32 reference.
        batches: images and labels of each step.
        shard_weights: relative sizes of the shards.
        path: directory of the trace.
        on_step: called after each step.

    Returns:
        The steps that were skipped because a gradient overflowed in float16.
    """
    state = reference.initial_state
    own: list[Arrays] = [state] * len(shard_weights)
    skipped = []
    with TraceWriter(path) as trace:
        _write_state(trace, 0, reference, state, own)
        for step, (images, labels) in enumerate(batches, start=1):
            shards = _shards(len(labels), shard_weights)
            results = reference.gradients(state, images, labels, shards, per_shard_statistics=own)
            examples = [hash_examples(images[rows], labels[rows]) for rows in shards]
            trace.write(step, "examples", [{"examples": hashes} for hashes in examples])
            trace.write(step, "loss", [{"loss": result.loss} for result in results])
            trace.write(step, "gradients", [result.gradients for result in results])
            sums = _sum(results)
            trace.write(step, "sums", [sums])
            own = [result.statistics for result in results]
            averaged = {name: np.mean([o[name] for o in own], axis=0) for name in own[0]}
            before, state = state, {**reference.update(state, sums), **averaged}
            if reference.scales_loss and state[LOSS_SCALE] < before[LOSS_SCALE]:
                skipped.append(step)
            _write_state(trace, step, reference, state, own)
            on_step(step)
    return skipped


def effect_of_shards(
    reference: Reference,
    images: np.ndarray,
    labels: np.ndarray,
    trace: Trace,
    shard_weights: Sequence[int],
) -> float:
    """Returns the effect of BatchNorm per shard on the first gradient, relative to the whole batch.

    Args:
        reference: a float32 reference.
        images: uint8 `(n, height, width, channels)`, the first global batch.
        labels: integers `(n,)`.
        trace: trace of the training by shards, with this batch.
        shard_weights: relative sizes of the shards.

    Returns:
        ‖by shards − whole batch‖ / ‖whole batch‖ over all tensors.
    """
    rows, start = np.arange(len(labels)), reference.initial_state
    if reference.scales_loss:  # The recorded gradients may overflow.
        start = {**start, LOSS_SCALE: np.array(1, np.float32)}
        shards = _shards(len(labels), shard_weights)
        by_shards = _sum(reference.gradients(start, images, labels, shards))
    else:
        by_shards = {t: trace.read(1, "sums", 0, t) for t in trace.tensors(1, "sums")}
    (whole,) = reference.gradients(start, images, labels, [rows])
    squares = [
        (np.sum((by_shards[tensor] - gradient) ** 2), np.sum(gradient**2))
        for tensor, gradient in whole.gradients.items()
    ]
    apart, size = np.asarray(squares, np.float64).sum(axis=0)
    return float(np.sqrt(apart / size))


def _sum(results: Sequence[ShardResult]) -> Arrays:
    sums = dict(results[0].gradients)
    with np.errstate(invalid="ignore"):  # Of gradients that overflow.
        for result in results[1:]:
            sums = {tensor: sums[tensor] + g for tensor, g in result.gradients.items()}
    return sums


def _shards(num_examples: int, weights: Sequence[int]) -> list[np.ndarray]:
    bounds = [weighted_bounds(num_examples, weights, s) for s in range(len(weights))]
    return [np.arange(start, end) for start, end in bounds]


def _write_state(
    trace: TraceWriter,
    step: int,
    reference: Reference,
    state: Arrays,
    own_statistics: list[Arrays],
) -> None:
    for kind, names in reference.names.items():
        if kind == "statistics":
            own = [{name: o[name] for name in names} for o in own_statistics]
            trace.write(step, "own statistics", own)
        trace.write(step, kind, [{name: state[name] for name in names}])
