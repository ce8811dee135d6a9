"""Shows who sums the gradients, and which loss `fit` shows, in the Keras 3 that is installed.

    python examples/keras3_changes.py

It trains a linear model for one step, on one device and on two, and prints the length of the update
of each replica and the loss. `docs/keras3_changes.md` explains what it prints.
"""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

GLOBAL_BATCH_SIZE = 8
X = np.random.default_rng(0).normal(size=(GLOBAL_BATCH_SIZE, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)


def loss_of(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """Returns the part of a replica in the mean loss of the whole batch."""
    return tf.reduce_sum(tf.square(y - y_pred)) / GLOBAL_BATCH_SIZE


class ScalarLoss(keras.losses.Loss):
    """Divides by the size of the whole batch, as in keras issue 16285."""

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        """Returns a scalar."""
        return loss_of(y_true, y_pred)


class OwnStep(keras.Sequential):
    """Has its own `train_step`, and returns the loss of the replica, as in keras issue 15509."""

    sums, key = False, "own_loss"

    def train_step(self, data: Any) -> dict[str, Any]:
        """Makes one update."""
        x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            loss = loss_of(y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if self.sums:
            gradients = tf.distribute.get_replica_context().all_reduce("sum", gradients)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {self.key: loss}


class SumsInStep(OwnStep):
    """Sums the gradients in `train_step`, as in keras issue 19308."""

    sums = True


class NamedLoss(OwnStep):
    """Returns the loss under the name `loss`."""

    key = "loss"


class OwnLoss(keras.Sequential):
    """Defines the loss in `compute_loss`, and leaves `train_step` as it is."""

    def compute_loss(self, x: Any = None, y: Any = None, y_pred: Any = None, *_: Any, **__: Any):
        """Returns the loss of a replica."""
        return loss_of(y, y_pred)


def compiled(create: Callable[..., keras.Sequential], loss: Any = None) -> keras.Sequential:
    """Returns a linear model."""
    model = create([keras.Input((3,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), loss)
    return model


def fit() -> keras.Sequential:
    """Has nothing of its own."""
    return compiled(keras.Sequential, "mse")


def sums() -> keras.Sequential:
    """Sums the gradients in `train_step`."""
    return compiled(SumsInStep)


def own_step() -> keras.Sequential:
    """Returns its loss from `train_step` as `own_loss`."""
    return compiled(OwnStep)


def named_loss() -> keras.Sequential:
    """Returns its loss from `train_step` as `loss`."""
    return compiled(NamedLoss)


def own_loss() -> keras.Sequential:
    """Defines its loss in `compute_loss`."""
    return compiled(OwnLoss)


def scalar() -> keras.Sequential:
    """Has a loss that is a scalar, divided by the size of the whole batch."""
    return compiled(keras.Sequential, ScalarLoss())


def data(global_batch_size: int) -> tf.data.Dataset:
    """Returns the batches, also for `verify --case`."""
    return tf.data.Dataset.from_tensor_slices((X, Y)).batch(global_batch_size)


def main() -> None:
    """Trains each model on one and on two logical CPU devices."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    print(f"Keras {keras.__version__}, TensorFlow {tf.__version__}")
    for create in (fit, sums, own_step, named_loss, own_loss, scalar):
        print(f"{create.__name__}: {create.__doc__}")
        for devices in ["CPU:0"], ["CPU:0", "CPU:1"]:
            strategy = tf.distribute.MirroredStrategy(devices)
            with strategy.scope():
                model = create()
            (loss,) = model.fit(data(GLOBAL_BATCH_SIZE), verbose=0).history.values()
            copies = strategy.experimental_local_results(model.layers[-1].kernel.value)
            lengths = " ".join(f"{np.linalg.norm(copy):.3f}" for copy in copies)
            print(f"  {len(devices)} update {lengths} loss {loss[0]:.3f}", flush=True)


if __name__ == "__main__":
    main()
