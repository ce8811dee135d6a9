"""Each replica divides the loss by the number of its own tokens.

Reported for language models with padding: the mean over the tokens of a global batch is not the
mean of the replicas' means, where they have differently many tokens. Here, padding is masked. The
corrected twin sums over the tokens and leaves the division to the learning rate.
"""

import keras
import numpy as np
import tensorflow as tf

BUG = "huggingface/transformers#34242"
LINK = "https://github.com/huggingface/transformers/issues/34242"
STAGE = "loss"
CAUSE = "weighted_mean_of_means"
NUM_TOKENS, LENGTH = 12, 6


def language_model(reduction: str, learning_rate: float) -> keras.Model:
    network = keras.Sequential(
        [
            keras.Input((LENGTH,), dtype="int32"),
            keras.layers.Embedding(NUM_TOKENS, 8, mask_zero=True, name="embedding"),
            keras.layers.LSTM(6, return_sequences=True, name="lstm"),
            keras.layers.Dense(NUM_TOKENS, name="logits"),
        ],
        name="network",
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=reduction)
    network.compile(optimizer=keras.optimizers.SGD(learning_rate), loss=loss)
    return network


def model() -> keras.Model:
    return language_model("sum_over_batch_size", 0.5)


def corrected_model() -> keras.Model:
    return language_model("sum", 0.01)


def data(global_batch_size: int) -> tf.data.Dataset:
    generator = np.random.default_rng(0)
    tokens = generator.integers(1, NUM_TOKENS, (2 * global_batch_size, LENGTH + 1))
    lengths = generator.integers(1, LENGTH + 1, len(tokens))
    tokens[np.arange(LENGTH + 1) > lengths[:, None]] = 0  # Padding.
    pairs = tokens[:, :-1], tokens[:, 1:]
    return tf.data.Dataset.from_tensor_slices(pairs).batch(global_batch_size)
