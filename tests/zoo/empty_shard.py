"""A replica gets no example of the last batch, and its loss is the mean over none: NaN.

Reported for custom losses on several GPUs, with a number of examples that leaves one for the last
batch. The loss of the step is NaN. Its update is not, but comes out half as large: the only example
has the weight of one of two shards. A sum over the examples, divided by a constant, is 0 for none.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "tensorflow/tensorflow#52053"
LINK = "https://github.com/tensorflow/tensorflow/issues/52053"
STAGE = "gradients"
CAUSE = "mean_of_means"
STEPS = (2,)


class MeanOverOwnExamples(keras.Sequential):
    def share_of_loss(self, squares: tf.Tensor, num_replicas: int) -> tf.Tensor:
        return tf.reduce_mean(squares) / num_replicas

    def train_step(self, data: tuple) -> dict:
        x, y = data
        num_replicas = tf.distribute.get_replica_context().num_replicas_in_sync
        with tf.GradientTape() as tape:
            loss = self.share_of_loss(tf.square(y - self(x, training=True)), num_replicas)
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


class SumOverConstant(MeanOverOwnExamples):
    def share_of_loss(self, squares: tf.Tensor, num_replicas: int) -> tf.Tensor:
        return tf.reduce_sum(squares) / 24


def model() -> keras.Model:
    return compiled_dense(kind=MeanOverOwnExamples)


def corrected_model() -> keras.Model:
    return compiled_dense(kind=SumOverConstant)


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size, 2 * global_batch_size + 1)
