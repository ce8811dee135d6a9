"""Remedies for faults of Keras under `tf.distribute`; `docs/keras_findings.md` lists the causes.

Copy what you need. Each, and each pair, makes the same training on several replicas as on one
device. The global batch has 12 examples. Remedies without code:

- *mean of means*: `drop_remainder=True`, with a batch size that the number of replicas divides.
- *mean of means (weighted)*: the default reduction; with masks, equally many unmasked steps on each
  replica.
- *other clipping (before the sum)*: see `docs/verify_your_own.md`.
- *overflow not skipped*: `keras.config.set_dtype_policy("mixed_bfloat16")`.
- *frozen*: `layer.trainable = False`, before `compile`.
"""

from typing import Any

import keras
import tensorflow as tf

GLOBAL_BATCH_SIZE = 12


class ReplicaDropout(keras.layers.Layer):
    """For *same random numbers*: `Dropout` with the number of the replica in its seed.

    Draw random numbers in layers, not in `train_step` or a model's own `call`: with synchronised
    BatchNorm only those of layers can be computed again.
    """

    def __init__(self, rate: float, seed: int = 0) -> None:
        super().__init__()
        self.rate, self.supports_masking = rate, True
        self.seed_generator = keras.random.SeedGenerator(seed)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        """Returns the inputs, in training with some set to 0, others on each replica."""
        if not training:
            return inputs
        replica = tf.distribute.get_replica_context().replica_id_in_sync_group
        seed = tf.cast(self.seed_generator.next(), tf.int32) + tf.stack([0, replica])
        return tf.nn.experimental.stateless_dropout(inputs, self.rate, seed)


def synchronised_norm() -> keras.layers.Layer:
    """For *local statistics*: BatchNorm over the whole batch.

    Not for inputs with a mask: normalise before the layer that makes the mask, or drop it.
    """
    return keras.layers.BatchNormalization(synchronized=True)


def loss_of_each_example(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """For *sum instead of mean (scalar loss)*: a loss with one number for each example.

    The mean over `axis=-1` leaves the axis of the examples.
    """
    return tf.reduce_mean(tf.square(y - y_pred), axis=-1)


class MeanOverGlobalBatch(keras.losses.MeanSquaredError):
    """For *mean of means*, weighted or not: a loss divided by the global batch size."""

    def __init__(self) -> None:
        super().__init__(reduction="sum")

    def __call__(self, y: Any, y_pred: Any, sample_weight: Any = None) -> Any:
        """Returns the sum over the examples of this replica, divided by the global batch size."""
        return super().__call__(y, y_pred, sample_weight) / GLOBAL_BATCH_SIZE


class RegularisedOnce(keras.Sequential):
    """For *regularisation not counted once*: each replica adds its part of `losses`."""

    def train_step(self, data: Any) -> dict[str, Any]:
        """Makes one update with the mean squared error."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = tf.cast(self(x, training=True), tf.float32)
            losses = tf.reduce_mean(tf.square(y - y_pred), axis=-1)
            if sample_weight is not None:
                losses *= tf.reshape(sample_weight, [-1] + [1] * (len(losses.shape) - 1))
            loss = tf.reduce_sum(losses) / GLOBAL_BATCH_SIZE
            if self.losses:
                loss += tf.nn.scale_regularization_loss(tf.add_n(self.losses))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}
