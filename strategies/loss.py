"""The loss of a shard: the one place where a summed loss is divided by the global example count."""

import tensorflow as tf

from strategies.base import StepTotals


def shard_loss(
    logits: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
) -> tuple[tf.Tensor, StepTotals]:
    """Computes the part that one shard has in the mean loss of its global batch.

    The cross-entropies of the shard are *summed* and divided by the number of examples in the
    *whole* global batch. Gradients of this loss, summed over the replicas, are therefore the exact
    gradient of the mean over the global batch, however unevenly the batch was split. A mean over
    the shard would not be: the mean of means weighs the examples of a small shard more.

    Nobody else may scale: Keras losses divide by the replica count on their own inside a
    `tf.distribute` strategy, which is why none is used here.

    Args:
        logits: float `(n, 10)`, n the size of this shard, which may be 0.
        labels: int32 `(n,)`, in 0 to 9.
        num_global_examples: int scalar, examples in the global batch of this step.

    Returns:
        The loss, a float32 scalar, and the totals of this shard.
    """
    logits = tf.cast(logits, tf.float32)
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
    loss_sum = tf.reduce_sum(losses)
    predictions = tf.argmax(logits, axis=-1, output_type=labels.dtype)
    totals = StepTotals(
        loss_sum=tf.cast(loss_sum, tf.float64),
        correct=tf.math.count_nonzero(predictions == labels),
        examples=tf.size(labels, out_type=tf.int64),
    )
    return loss_sum / tf.cast(num_global_examples, tf.float32), totals
