"""Remedies for faults of Keras under `tf.distribute`; `docs/keras_findings.md` explains them.

Copy what you need. Each, and each pair, makes the same training on several replicas as on one
device. The global batch has 12 examples. Remedies without code:

- *mean of means*: `drop_remainder=True`, with a batch size that the number of replicas divides.
- *mean of means*, with weights: the default reduction; with masks, equally many unmasked steps on
  each replica.
- *overflow not skipped*: `keras.config.set_dtype_policy("mixed_bfloat16")`.
- *weights trained in one training only*: `layer.trainable = False`, before `compile`.
"""

from typing import Any

import keras
import tensorflow as tf

GLOBAL_BATCH_SIZE = 12


class ReplicaDropout(keras.layers.Layer):
    """For *same random numbers on ranks*: `Dropout` with the number of the replica in its seed.

    The state of the generator stays equal on all replicas: only a reference by parts, as
    `python -m lockstep run` makes it, tells that what they draw is not.
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
    """For *layers that normalise each rank's examples*: BatchNorm over the whole batch.

    Not for inputs with a mask: normalise before the layer that makes the mask, or drop it.
    """
    return keras.layers.BatchNormalization(synchronized=True)


def loss_of_each_example(y: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
    """For *wrong factor*: a loss with one number for each example.

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
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


class ClipsTheSum(keras.Sequential):
    """For *clipped too early*: clips after its all-reduce."""

    def train_step(self, data: Any) -> dict[str, Any]:
        """Makes one update with gradients that are clipped to a norm of 0.1 each."""
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(data)
        with tf.GradientTape() as tape:
            y_pred = self(x, training=True)
            loss = self.compute_loss(x=x, y=y, y_pred=y_pred, sample_weight=sample_weight)
        gradients = tape.gradient(loss, self.trainable_variables)
        replica = tf.distribute.get_replica_context()
        dense = [tf.convert_to_tensor(g) for g in gradients]  # Those of an Embedding are sparse.
        sums = replica.all_reduce("SUM", dense)
        clipped = [tf.clip_by_norm(g, 0.1) / replica.num_replicas_in_sync for g in sums]
        self.optimizer.apply(clipped, self.trainable_variables)  # Sums over the replicas again.
        return {"loss": loss}
