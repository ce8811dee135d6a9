"""An actor and a critic share a trunk; the gradients of both heads have to be summed.

id = "keras/head_not_reduced"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["jingyaogong/minimind#853"]
tags = ["mirrored", "adam"]

[wrong.critic_not_summed]
title = "the critic's gradients are not summed"
place = { node = "sum", step = 0, ranks = "all", tensors = ["critic/*"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE = 12


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


class Adam(keras.optimizers.Adam):
    def _all_reduce_sum_gradients(self, grads_and_vars):
        own = list(grads_and_vars)
        summed = super()._all_reduce_sum_gradients(own)
        if BUG != "critic_not_summed":
            return summed
        return [
            before if "critic" in before[1].name else after
            for before, after in zip(own, summed, strict=True)
        ]


def build_model():
    state = keras.Input((6,), name="state")
    features = keras.layers.Dense(8, "tanh", name="trunk")(state)
    heads = {name: keras.layers.Dense(2, name=name)(features) for name in ("actor", "critic")}
    return keras.Model(state, heads)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = build_model()
        model.compile(Adam(0.01), {"actor": "mse", "critic": "mae"})
    x, y = get_data(2 * BATCH_SIZE)
    dataset = tf.data.Dataset.from_tensor_slices((x, {"actor": y, "critic": -y}))
    with harness.training(model):
        model.fit(dataset.batch(BATCH_SIZE), verbose=0)


if __name__ == "__main__":
    main()
