"""Records a custom `train_step` of Keras, whose loss is the mean over a replica's examples.

    PYTHONPATH=. .venv/bin/python -m lockstep run \
        --reference ".venv/bin/python examples/record_train_step.py 1" \
        --variant "wrong=.venv/bin/python examples/record_train_step.py 2" \
        --variant "right=.venv/bin/python examples/record_train_step.py 2 corrected"

The argument is the number of devices. Under a strategy, such a loss must be divided by the number
of replicas, because Keras sums gradients. With `corrected`, the program divides it.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import lockstep


class Regression(keras.Model):
    """Two layers, with a loss computed in the training step."""

    def __init__(self, divides_by_replicas: bool):
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


def load_batches() -> tf.data.Dataset:
    """Returns 10 batches of 64 examples."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(640, 8)).astype(np.float32)
    y = np.sin(x.sum(axis=1, keepdims=True)).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((x, y)).batch(64)


def main(num_devices: int, is_corrected: bool) -> None:
    """Trains on logical CPU devices."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_devices)])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = Regression(is_corrected)
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9))
        model.build((None, 8))
    with lockstep.record(model):
        model.fit(load_batches(), verbose=0)


if __name__ == "__main__":
    main(int(sys.argv[1]), "corrected" in sys.argv)
