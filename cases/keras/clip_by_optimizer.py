"""The optimizer's global_clipnorm clips the gradients of each replica before they are summed.

id = "keras/clip_by_optimizer"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["tensorflow/tensorflow#33929", "tensorflow/tensorflow#36001"]
date = "2020-05"
tags = ["clipping", "mirrored", "sgd"]

[wrong.clipped_before_sum]
title = "clipped before the sum"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.summed_clipped_and_summed_by_optimizer_again]
title = "summed, clipped, and summed by the optimizer again"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, MAX_NORM = 16, 0.2


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


class Clipping(keras.Model):
    """Clips the sum of the gradients; the optimizer adds equal parts of it."""

    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        gradients = tape.gradient(loss, self.trainable_variables)
        if BUG != "clipped_before_sum":
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("sum", gradients)
            gradients, _ = tf.clip_by_global_norm(gradients, MAX_NORM)
            if BUG != "summed_clipped_and_summed_by_optimizer_again":
                gradients = [g / context.num_replicas_in_sync for g in gradients]
        self.optimizer.apply(gradients, self.trainable_variables)
        return {"loss": loss}


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    random = np.random.default_rng(0)
    x = random.normal(size=(2 * BATCH_SIZE, 6)).astype("float32")
    y = np.sin(x[:, :2] + x[:, 2:4])
    y[::3] *= 4
    with strategy.scope():
        inputs = keras.Input((6,))
        outputs = keras.layers.Dense(2)(keras.layers.Dense(12, "tanh")(inputs))
        model = Clipping(inputs, outputs)
        own = {"global_clipnorm": MAX_NORM} if BUG == "clipped_before_sum" else {}
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True, **own), "mse")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
