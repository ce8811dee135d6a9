"""The summed gradients are clipped in a branch that all replicas have to take.

id = "keras/clipped_on_one_rank"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["deepspeedai/DeepSpeed#1801"]
tags = ["clipping", "mirrored", "sgd"]

[wrong.first_rank_clips]
title = "only the first replica takes the branch"
place = { node = "clipping", step = 0, ranks = [1], tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, MAX_NORM = 12, 0.05


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def get_data(num_examples):
    random = np.random.default_rng(0)
    x = random.normal(size=(num_examples, 6)).astype("float32")
    return x, np.tanh(x @ random.normal(size=(6, 2))).astype("float32")


class ClipsTheSum(keras.Sequential):
    """Divides the sums by the number of replicas, since the optimizer sums again."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_weights)
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce("sum", gradients)
        clips = BUG != "first_rank_clips" or context.replica_id_in_sync_group == 0
        gradients = [
            tf.where(clips, tf.clip_by_norm(gradient, MAX_NORM), gradient) / DEVICES
            for gradient in gradients
        ]
        self.optimizer.apply(gradients, self.trainable_weights)
        return {"loss": loss}


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = ClipsTheSum(
            [keras.Input((6,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(2)]
        )
        model.compile(keras.optimizers.SGD(0.1), "mse")
    dataset = tf.data.Dataset.from_tensor_slices(get_data(2 * BATCH_SIZE)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
