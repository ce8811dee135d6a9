"""Accumulated gradients are the mean of the micro-batches' means.

Reported for language models: each micro-batch divides by its own number of labels, so that a step
with accumulation is not the step of one large batch. The same holds for a step on several replicas,
whose micro-batches are others. The corrected twin divides by the labels of the global batch.
"""

import keras
import numpy as np
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "huggingface/transformers#34191"
LINK = "https://github.com/huggingface/transformers/pull/34191"
STAGE = "gradients"
CAUSE = "not_a_sum_over_examples"
STATUS = "by design"
NUM_MICRO_BATCHES = 2


class Accumulates(keras.Sequential):
    def loss_of(self, losses: tf.Tensor, weights: tf.Tensor, num_labels: tf.Tensor) -> tf.Tensor:
        share = NUM_MICRO_BATCHES * tf.distribute.get_replica_context().num_replicas_in_sync
        return tf.reduce_sum(losses * weights) / tf.reduce_sum(weights) / share

    def train_step(self, data: tuple) -> dict:
        x, y, weights = data
        context = tf.distribute.get_replica_context()
        num_labels = context.all_reduce(tf.distribute.ReduceOp.SUM, tf.reduce_sum(weights))
        total = [tf.zeros(variable.shape) for variable in self.trainable_weights]
        for part in range(NUM_MICRO_BATCHES):
            mine = slice(part, None, NUM_MICRO_BATCHES)
            with tf.GradientTape() as tape:
                errors = tf.square(y[mine] - self(x[mine], training=True))
                losses = tf.reduce_mean(errors, axis=-1)
                loss = self.loss_of(losses, weights[mine], num_labels)
            gradients = tape.gradient(loss, self.trainable_weights)
            total = [a + b for a, b in zip(total, gradients, strict=True)]
        self.optimizer.apply(total, self.trainable_weights)
        return {"loss": loss}


class AccumulatesSums(Accumulates):
    def loss_of(self, losses: tf.Tensor, weights: tf.Tensor, num_labels: tf.Tensor) -> tf.Tensor:
        return tf.reduce_sum(losses * weights) / num_labels


def model() -> keras.Model:
    return compiled_dense(kind=Accumulates)


def corrected_model() -> keras.Model:
    return compiled_dense(kind=AccumulatesSums)


def data(global_batch_size: int) -> tf.data.Dataset:
    num_labels = np.random.default_rng(1).integers(1, 9, 24).astype("float32")
    weights = tf.data.Dataset.from_tensor_slices(num_labels).batch(global_batch_size)
    batches = tf.data.Dataset.zip(regression_data(global_batch_size), weights)
    return batches.map(lambda pair, weight: (*pair, weight))
