"""The loss of a language model is a mean over all tokens of the batch that are no padding.

id = "keras/token_weights"
framework = "keras"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#34242"]
date = "2024-10"
tags = ["mirrored", "recurrent", "embedding", "sgd"]

[wrong.mean_of_replica]
title = "a mean over the tokens of each replica"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, WORDS = 12, 12


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def get_tokens():
    """Returns sequences of 1 to 6 words, and zeros after them."""
    random = np.random.default_rng(0)
    tokens = random.integers(1, WORDS, (2 * BATCH_SIZE, 7))
    lengths = random.integers(1, 7, len(tokens))
    tokens[np.arange(7) > lengths[:, None]] = 0
    return tokens


class LanguageModel(keras.Sequential):
    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, y_pred)
        weights = tf.cast(y != 0, "float32")
        count = tf.reduce_sum(weights)
        if BUG == "mean_of_replica":
            count = count * DEVICES
        else:
            count = tf.distribute.get_replica_context().all_reduce("sum", count)
        return tf.reduce_sum(losses * weights) / count


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(1)
    with strategy.scope():
        model = LanguageModel(
            [
                keras.Input((6,), dtype="int32"),
                keras.layers.Embedding(WORDS, 8, mask_zero=True),
                keras.layers.LSTM(6, return_sequences=True),
                keras.layers.Dense(WORDS),
            ]
        )
        model.compile(keras.optimizers.SGD(0.5))
    tokens = get_tokens()
    pairs = tf.data.Dataset.from_tensor_slices((tokens[:, :-1], tokens[:, 1:]))
    with harness.training(model):
        model.fit(pairs.batch(BATCH_SIZE), verbose=0)


if __name__ == "__main__":
    main()
