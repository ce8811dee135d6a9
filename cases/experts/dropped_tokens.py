"""Tokens beyond the capacity of an expert are dropped: only the residual path has them.

id = "experts/dropped_tokens"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#37017"]
date = "2025-03"
tags = ["experts", "mirrored", "embedding"]

[wrong.dropped_tokens_keep_their_scaled_input]
title = "dropped tokens keep their scaled input"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["switch", "switch_1"] }

[wrong.places_in_expert_are_counted_over_batch]
title = "places in an expert are counted over the batch"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["switch", "switch_1"] }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, LENGTH, WIDTH, EXPERTS, CAPACITY, WORDS = 8, 12, 8, 3, 3, 20


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


class Switch(keras.layers.Layer):
    """In each sequence, an expert takes the first tokens that choose it."""

    def build(self, shape):
        self.router = self.add_weight(name="router", shape=(WIDTH, EXPERTS))
        self.inner = self.add_weight(name="inner", shape=(EXPERTS, WIDTH, 2 * WIDTH))
        self.outer = self.add_weight(name="outer", shape=(EXPERTS, 2 * WIDTH, WIDTH))

    def call(self, x):
        scores = tf.nn.softmax(x @ self.router)
        chosen = tf.one_hot(tf.argmax(scores, -1), EXPERTS)
        if BUG == "places_in_expert_are_counted_over_batch":
            places = tf.reshape(tf.cumsum(tf.reshape(chosen, (-1, EXPERTS))), tf.shape(chosen))
            capacity = CAPACITY * tf.cast(tf.shape(x)[0], x.dtype)
        else:
            places, capacity = tf.cumsum(chosen, axis=1), CAPACITY
        taken = tf.where(places <= capacity, chosen, 0)
        hidden = tf.nn.relu(tf.einsum("bsd,edh->bseh", x, self.inner))
        y = tf.einsum("bseh,ehd,bse->bsd", hidden, self.outer, taken)
        if BUG == "dropped_tokens_keep_their_scaled_input":
            y += x * (1 - tf.reduce_sum(taken, -1, keepdims=True))
        return x + y * tf.reduce_sum(scores * chosen, -1, keepdims=True)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(5)
    tokens = np.random.default_rng(2).integers(WORDS, size=(2 * BATCH_SIZE, LENGTH + 1))
    tokens = np.sort(tokens.astype("int32"), 1)
    dataset = tf.data.Dataset.from_tensor_slices((tokens[:, :-1], tokens[:, 1:]))
    with strategy.scope():
        layers = [keras.layers.Embedding(WORDS, WIDTH, "random_normal"), Switch()]
        layers += [keras.layers.LayerNormalization(), Switch(), keras.layers.Dense(WORDS)]
        model = keras.Sequential([keras.Input((LENGTH,), dtype="int32"), *layers])
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.RMSprop(0.01, rho=0.8, epsilon=1e-3), loss)
    with harness.training(model):
        model.fit(dataset.batch(BATCH_SIZE), epochs=1, shuffle=False, verbose=0)


if __name__ == "__main__":
    main()
