"""Attention adds biases that grow with the place of a key, and 16 bits make far places equal.

id = "precision/linear_biases"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["HabanaAI/vllm-fork#503", "huggingface/transformers#17474"]
date = "2024-11"
tags = ["low_precision", "mirrored", "sgd"]

[wrong.biases_are_rounded_to_bfloat16]
title = "biases are rounded to bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["attention*"] }

[wrong.biases_of_second_layer_are_rounded]
title = "biases of the second layer are rounded to bfloat16"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["attention_1*"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, LENGTH, SIZE, WIDTH, HEADS = 4, 120, 3, 8, 2


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


class Attention(keras.layers.Layer):
    """Causal attention with a slope for each head, times the place of the key."""

    def __init__(self, number):
        super().__init__()
        self.number = number
        self.mix, self.leave = keras.layers.Dense(3 * WIDTH), keras.layers.Dense(WIDTH)

    def build(self, shape):
        self.mix.build(shape)
        self.leave.build((*shape[:-1], WIDTH))

    def call(self, x):
        names = ["biases_are_rounded_to_bfloat16"]
        if self.number == 1:
            names.append("biases_of_second_layer_are_rounded")
        places = tf.range(LENGTH, dtype=tf.float32)
        biases = tf.constant([0.7, 0.3])[:, None, None] * places
        if BUG in names:
            biases = tf.cast(tf.cast(biases, tf.bfloat16), tf.float32)
        parts = tf.split(tf.reshape(self.mix(x), (-1, LENGTH, HEADS, 3 * WIDTH // HEADS)), 3, -1)
        scores = tf.einsum("bqhd,bkhd->bhqk", parts[0], parts[1]) / (WIDTH / HEADS) ** 0.5 + biases
        scores = tf.where(places[:, None] >= places, scores, -1e9)
        y = tf.einsum("bhqk,bkhd->bqhd", tf.nn.softmax(scores), parts[2])
        return x + self.leave(tf.reshape(y, (-1, LENGTH, WIDTH)))


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(16)
    random = np.random.default_rng(8)
    x = random.normal(size=(2 * BATCH_SIZE, LENGTH, SIZE)).astype("float32")
    y = np.roll(x, 2, 1)
    with strategy.scope():
        layers = [keras.layers.Dense(WIDTH), Attention(0), Attention(1), keras.layers.Dense(SIZE)]
        model = keras.Sequential([keras.Input((LENGTH, SIZE)), *layers])
        model.compile(keras.optimizers.SGD(0.5, momentum=0.9), "mean_squared_error")
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    with harness.training(model):
        model.fit(dataset, epochs=1, shuffle=False, verbose=0)


if __name__ == "__main__":
    main()
