"""Defines a custom training step, whose loss is the mean over a replica's examples.

    .venv/bin/python main.py verify --case=examples/case_train_step.py --num_devices=2

Under a strategy, such a loss must be divided by the number of replicas, because Keras sums
gradients. `corrected` divides it: `--case=examples/case_train_step.py:corrected`.
"""

import keras
import numpy as np
import tensorflow as tf


class Regression(keras.Model):
    """Two layers, with a loss computed in the training step."""

    def __init__(self, divides_by_replicas: bool = False):
        super().__init__()
        self.hidden = keras.layers.Dense(16, activation="tanh")
        self.out = keras.layers.Dense(1)
        self.divides_by_replicas = divides_by_replicas

    def call(self, x: tf.Tensor) -> tf.Tensor:
        """Returns the predictions."""
        return self.out(self.hidden(x))

    def train_step(self, data: tuple[tf.Tensor, tf.Tensor]) -> dict[str, tf.Tensor]:
        """Trains one step on the examples of this replica."""
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
            if self.divides_by_replicas:
                loss /= tf.distribute.get_strategy().num_replicas_in_sync
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def model() -> keras.Model:
    """Returns the model whose loss is not divided by the number of replicas."""
    network = Regression()
    network.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="mse")
    return network


def corrected() -> keras.Model:
    """Returns the model whose loss is divided by the number of replicas."""
    network = Regression(divides_by_replicas=True)
    network.compile(optimizer=keras.optimizers.SGD(0.05, momentum=0.9), loss="mse")
    return network


def data(global_batch_size: int) -> tf.data.Dataset:
    """Returns batches of 640 examples."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(640, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(global_batch_size)
