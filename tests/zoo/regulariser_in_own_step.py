"""A custom `train_step` divides the data loss by the global batch, but not the regularisation.

Asked about for custom training loops: the regularisation loss is the same number on every replica,
so the summed gradients hold it as many times as there are replicas.
`tf.nn.scale_regularization_loss` divides it.
"""

import keras
import tensorflow as tf
from small import dense_layers, regression_data

BUG = "tensorflow/tensorflow#48875"
LINK = "https://github.com/tensorflow/tensorflow/issues/48875"
STAGE = "gradients"
CAUSE = "regulariser_repeated"
TENSORS = "hidden/kernel"


class OwnStep(keras.Sequential):
    def share_of_regularisation(self) -> tf.Tensor:
        return tf.add_n(self.losses)

    def train_step(self, data: tuple) -> dict:
        x, y = data
        with tf.GradientTape() as tape:
            losses = tf.reduce_mean(tf.square(y - self(x, training=True)), axis=-1)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=12)
            loss += self.share_of_regularisation()
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


class OwnStepWithShare(OwnStep):
    def share_of_regularisation(self) -> tf.Tensor:
        return tf.nn.scale_regularization_loss(tf.add_n(self.losses))


def regularised(kind: type[keras.Sequential]) -> keras.Model:
    network = kind(dense_layers(kernel_regularizer=keras.regularizers.L2(0.1)), name="network")
    network.compile(optimizer=keras.optimizers.SGD(0.1))
    return network


def model() -> keras.Model:
    return regularised(OwnStep)


def corrected_model() -> keras.Model:
    return regularised(OwnStepWithShare)


def data(global_batch_size: int) -> tf.data.Dataset:
    return regression_data(global_batch_size)
