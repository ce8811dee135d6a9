"""Weight decay of AdamW: in the weights and not the gradient, times the rate, and not of biases.

id = "keras/decay_of_biases"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#19051", "tensorflow/addons#2282"]
date = "2020-12"
tags = ["mirrored", "adam"]

[wrong.decay_is_in_loss]
title = "the decay is in the loss"
place = { node = "loss", step = 0, ranks = "all", tensors = ["dense/kernel", "dense_1/kernel"] }

[wrong.decay_is_not_multiplied_by_rate]
title = "the decay is not multiplied by the rate"
place = { node = "update", step = 0, ranks = "all", tensors = ["dense/kernel", "dense_1/kernel"] }

[wrong.biases_and_norms_decay_too]
title = "biases and norms decay, too"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "dense/bias",
    "layer_normalization/gamma",
] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, RATE, DECAY = 16, 0.05, 0.4


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def build_model():
    in_the_loss = BUG == "decay_is_in_loss"
    penalty = keras.regularizers.L2(DECAY / 2) if in_the_loss else None
    layers = [
        keras.layers.Dense(12, kernel_regularizer=penalty, bias_initializer="random_normal"),
        keras.layers.LayerNormalization(),
        keras.layers.Activation("gelu"),
        keras.layers.Dense(4, kernel_regularizer=penalty),
    ]
    model = keras.Sequential([keras.Input((6,)), *layers])
    if in_the_loss:
        optimizer = keras.optimizers.Adam(RATE, epsilon=1e-3)
    else:
        unscaled = BUG == "decay_is_not_multiplied_by_rate"
        decay = DECAY / RATE if unscaled else DECAY
        optimizer = keras.optimizers.AdamW(RATE, weight_decay=decay, epsilon=1e-3)
        if BUG != "biases_and_norms_decay_too":
            optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
    model.compile(optimizer, keras.losses.Poisson())
    return model


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(4)
    x = np.random.default_rng(8).normal(size=(2 * BATCH_SIZE, 6)).astype("float32")
    y = np.square(x[:, :4] + x[:, 2:])
    with strategy.scope():
        model = build_model()
        model.layers[-1].activation = keras.activations.softplus
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, epochs=1, shuffle=False, verbose=0)


if __name__ == "__main__":
    main()
