"""Computes gradients and totals of a compiled Keras model for the whole global batch.

`keras_objective.py` explains and defines each part. This file combines them, for a list of replicas
(`manual`) and for a single replica in replica context (`tf.distribute`).
"""

from collections.abc import Callable, Sequence

import tensorflow as tf

from strategies.keras_objective import Forward, KerasObjective
from strategies.observer import Predicted
from strategies.replica import Replica
from strategies.shard_step import ShardStep, Statistics
from strategies.step_totals import StepTotals

# Concatenates the given replicas' tensors `(n_r, ...)` to tensors `(N, ...)` over all replicas.
Gather = Callable[[Sequence[Sequence[tf.Tensor]]], list[tf.Tensor]]


def gather_by_hand(per_replica_tensors: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Concatenates the rows of all replicas on the current device."""
    return [tf.concat(parts, axis=0) for parts in zip(*per_replica_tensors, strict=True)]


def gather_over_replicas(per_replica_tensors: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
    """Concatenates the rows of all replicas, given this replica's, in replica context."""
    context, (tensors,) = tf.distribute.get_replica_context(), per_replica_tensors
    return list(context.all_gather(list(tensors), axis=0)) if tensors else []


def gather_padded(per_replica_tensors: Sequence[Sequence[tf.Tensor]], most: int) -> list[tf.Tensor]:
    """Concatenates the rows of all replicas, in replica context, with collectives of fixed shape.

    TensorFlow's collectives of several workers fail if the batch size changes.

    Args:
        per_replica_tensors: tensors of this replica, all with the same number of rows.
        most: largest number of rows of a replica.
    """
    context, (tensors,) = tf.distribute.get_replica_context(), per_replica_tensors
    if not tensors:
        return []
    num_rows = tf.shape(tensors[0])[0]
    is_row = tf.sequence_mask(context.all_gather(num_rows[tf.newaxis], axis=0), most)
    padded = []
    for tensor in tensors:
        rest = [[0, 0]] * (tensor.shape.rank - 1)
        padded.append(tf.pad(tensor, [[0, most - num_rows], *rest]))
        padded[-1].set_shape([most, *tensor.shape[1:]])
    gathered = context.all_gather(padded, axis=0)
    return [tf.boolean_mask(tensor, tf.reshape(is_row, [-1])) for tensor in gathered]


def gradients_of_whole_batch(
    strategy: ShardStep,
    replicas: Sequence[Replica],
    shards: Sequence[Sequence[tf.Tensor]],
    batch: Sequence[tf.Tensor],
    gather: Gather,
) -> tuple[list[list[tf.Tensor]], list[StepTotals]]:
    """Computes each replica's part of the gradients of the loss of a whole global batch.

    Args:
        strategy: a strategy with an objective.
        replicas: the replicas to compute.
        shards: for each of `replicas`, leaves `(n_r, ...)` of inputs, targets and weights.
        batch: leaves `(N, ...)` of the whole batch.
        gather: concatenates predictions.

    Returns:
        For each of `replicas`, its gradients, to be summed over all replicas, and its part of the
        totals.
    """
    objective = _objective(strategy)
    size = tf.shape(batch[0])[0]
    shares = _shares(shards, batch)
    if objective.has_own_train_step:
        return _own_steps(strategy, replicas, shards, shares, size)
    forwards = []
    for replica, shard, share in zip(replicas, shards, shares, strict=True):
        with tf.device(replica.device):
            forwards.append(objective.forward(replica, shard, share))  # 1. Predictions.
    with tf.device(replicas[0].device):  # 2. The loss of the whole batch.
        predictions, masks = _joined(forwards, gather)
        loss, gradients = objective.loss(replicas[0], batch, predictions, masks)
    per_replica_gradients, per_replica_totals = [], []
    for replica, shard, share, forward in zip(replicas, shards, shares, forwards, strict=True):
        start, end = strategy.shard_bounds(size, replica.replica_id)
        with tf.device(replica.device):  # 3. The backward pass from its own predictions.
            own = objective.backward(replica, forward, [g[start:end] for g in gradients])
            part = share * loss + forward.regular
            strategy.observer.on_predictions(
                replica.replica_id,
                Predicted(shard, forward.predictions, forward.masks, part, forward.regular),
            )
            own = strategy.observer.on_gradients(replica.replica_id, own)
        per_replica_gradients.append(own)
        per_replica_totals.append(_totals(part, size, shard))
    return per_replica_gradients, per_replica_totals


def _own_steps(
    strategy: ShardStep,
    replicas: Sequence[Replica],
    shards: Sequence[Sequence[tf.Tensor]],
    shares: Sequence[tf.Tensor],
    size: tf.Tensor,
) -> tuple[list[list[tf.Tensor]], list[StepTotals]]:
    """Runs the model's own training step on each device."""
    per_replica_gradients, per_replica_totals = [], []
    for replica, shard, share in zip(replicas, shards, shares, strict=True):
        with tf.device(replica.device):
            gradients, part = _objective(strategy).gradients_of_own_step(replica, shard, share)
            strategy.observer.on_predictions(
                replica.replica_id, Predicted(shard, [], [], None, None)
            )
            gradients = strategy.observer.on_gradients(replica.replica_id, gradients)
        per_replica_gradients.append(gradients)
        per_replica_totals.append(_totals(part, size, shard))
    return per_replica_gradients, per_replica_totals


def evaluate_whole_batch(
    strategy: ShardStep,
    replicas: Sequence[Replica],
    shards: Sequence[Sequence[tf.Tensor]],
    batch: Sequence[tf.Tensor],
    gather: Gather,
    *,
    statistics: Statistics,
    metric_states: Sequence[tf.Tensor],
) -> tuple[StepTotals, list[tf.Tensor]]:
    """Computes the totals of a whole batch, each example counted once, and updates the metrics.

    Args:
        strategy: a strategy with an objective.
        replicas: the replicas to compute.
        shards: for each of `replicas`, its leaves.
        batch: leaves of the whole batch.
        gather: concatenates predictions.
        statistics: path of a variable → tensor that replaces the replicas' value.
        metric_states: metric states before this batch.

    Returns:
        The totals, and the metric states after this batch.
    """
    objective, forwards = _objective(strategy), []
    for replica, shard in zip(replicas, shards, strict=True):
        with tf.device(replica.device):
            forwards.append(objective.predict(replica, shard, statistics))
    with tf.device(replicas[0].device):
        predictions, masks = _joined(forwards, gather)
        parts = zip(_shares(shards, batch), forwards, strict=True)
        (regular,) = gather(
            [[tf.math.multiply_no_nan(f.regular, share)[tf.newaxis]] for share, f in parts]
        )
        return objective.evaluate(
            replicas[0], batch, predictions, masks, tf.reduce_sum(regular), metric_states
        )


def _shares(shards: Sequence[Sequence[tf.Tensor]], batch: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns n_r / N for each shard, float scalars."""
    size = tf.shape(batch[0])[0]
    return [tf.cast(tf.shape(shard[0])[0] / size, tf.float32) for shard in shards]


def _joined(
    forwards: Sequence[Forward], gather: Gather
) -> tuple[list[tf.Tensor], list[tf.Tensor | None]]:
    """Returns predictions and masks of all replicas."""
    predictions = gather([forward.predictions for forward in forwards])
    has_mask = [mask is not None for mask in forwards[0].masks]
    # Collectives do not support bool.
    masks = iter(
        gather([[tf.cast(m, tf.int32) for m in f.masks if m is not None] for f in forwards])
    )
    return predictions, [tf.cast(next(masks), tf.bool) if has else None for has in has_mask]


def _totals(part: tf.Tensor, size: tf.Tensor, shard: Sequence[tf.Tensor]) -> StepTotals:
    """Returns a replica's part of the totals; a loss sum is the mean loss times the batch size."""
    return StepTotals(
        tf.cast(part, tf.float64) * tf.cast(size, tf.float64),
        tf.zeros([], tf.int64),
        tf.cast(tf.shape(shard[0])[0], tf.int64),
    )


def _objective(strategy: ShardStep) -> KerasObjective:
    assert strategy.objective is not None
    return strategy.objective
