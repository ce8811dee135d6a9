"""`clipnorm` clips the gradients of each replica, before they are summed.

Reported for TensorFlow, which refused the option under a strategy for that reason; Keras 3 accepts
it again and clips too early. The direction and the size of the update depend on the number of
replicas. A `train_step` that clips after its all-reduce is right; it divides by the
number of replicas, since the optimizer sums once more.
"""

import keras
import tensorflow as tf
from small import compiled_dense, regression_data

BUG = "tensorflow/tensorflow#33929"
LINK = "https://github.com/tensorflow/tensorflow/issues/33929"
STAGE = "clipping"
CAUSE = "clipped_before_the_sum"


class ClipsTheSum(keras.Sequential):
    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        context = tf.distribute.get_replica_context()
        summed = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients)
        clipped = [tf.clip_by_norm(gradient, 0.05) for gradient in summed]
        share = 1 / context.num_replicas_in_sync
        self.optimizer.apply([gradient * share for gradient in clipped], self.trainable_weights)
        return {"loss": loss}


def model() -> keras.Model:
    return compiled_dense(keras.optimizers.SGD(0.1, clipnorm=0.05))


def corrected_model() -> keras.Model:
    return compiled_dense(keras.optimizers.SGD(0.1), kind=ClipsTheSum)


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
