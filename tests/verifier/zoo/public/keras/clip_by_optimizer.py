"""The optimizer's global_clipnorm clips the gradients of each replica before they are summed.

reference = "tensorflow/tensorflow#33929, tensorflow/tensorflow#36001"
date = "2020-05"
framework = "keras"

[wrong]
"clipped before the sum" = ["clipped_before_the_sum"]
"summed, clipped, and summed by the optimizer again" = [
    "sum_instead_of_mean",
    "repeated_gradient",
    "other_clipping",
    "scaled_gradient",
]
"""

import os

import keras
import numpy as np
import tensorflow as tf

import lockstep

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
        if BUG != "clipped before the sum":
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("sum", gradients)
            gradients, _ = tf.clip_by_global_norm(gradients, MAX_NORM)
            if BUG != "summed, clipped, and summed by the optimizer again":
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
        own = {"global_clipnorm": MAX_NORM} if BUG == "clipped before the sum" else {}
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9, nesterov=True, **own), "mse")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    with lockstep.record(model):
        model.fit(dataset, verbose=0)


if __name__ == "__main__":
    main()
