"""Gradients of the replicas' mean losses are added, not averaged.

Reported for the replicated mode of TensorFlow's benchmarks, in contrast to Horovod's: the update is
as many times too large as there are replicas, like a larger learning rate. In a custom
`train_step`, the mean over the replica's examples must be divided by the number of replicas.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "tensorflow/benchmarks#190"
LINK = "https://github.com/tensorflow/benchmarks/pull/190"
STAGE = "gradients"
CAUSE = "scalar_loss_not_divided"


class MeanOfReplica(keras.Sequential):
    def divisor(self) -> int:
        return 1

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            mean = tf.reduce_mean(tf.square(y - self(x, training=True)))
            loss = mean / self.divisor()
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": mean}


class MeanOfBatch(MeanOfReplica):
    def divisor(self) -> int:
        return tf.distribute.get_replica_context().num_replicas_in_sync


def model() -> keras.Model:
    return compiled_dense(kind=MeanOfReplica)


def corrected_model() -> keras.Model:
    return compiled_dense(kind=MeanOfBatch)


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
