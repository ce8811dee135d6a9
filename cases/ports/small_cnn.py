"""A small CNN is ported from PyTorch to Keras, whose defaults differ.

The head is in small_cnn.toml. Each mistake leaves a default of Keras as it is.
"""

import argparse
import os

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from cases import harness

BUG = os.environ.get("BUG", "")
NUM_EXAMPLES, BATCH_SIZE, EPOCHS = 76, 32, 2


def load_data():
    generator = np.random.default_rng(0)
    labels = generator.integers(10, size=NUM_EXAMPLES)
    images = generator.random((NUM_EXAMPLES, 1, 28, 28)) + 0.1 * labels[:, None, None, None]
    images = images.transpose(0, 2, 3, 1).astype(np.float32)
    dataset = tf.data.Dataset.from_tensor_slices((images, labels))
    return dataset.batch(BATCH_SIZE, drop_remainder=BUG == "drop_last")


def build_model(options):
    def settings(fan_in):
        """Returns the initialisers of PyTorch, and its weight decay as a part of the loss."""
        given = {}
        if BUG != "initialisers":
            limit = fan_in**-0.5
            given["kernel_initializer"] = keras.initializers.RandomUniform(-limit, limit)
            given["bias_initializer"] = keras.initializers.RandomUniform(-limit, limit)
        return given | {"kernel_regularizer": decay, "bias_regularizer": decay}

    def block(filters, fan_in):
        if BUG != "padding":
            yield layers.ZeroPadding2D(1)
        padding = "same" if BUG == "padding" else "valid"
        yield layers.Conv2D(filters, 3, strides=2, padding=padding, **settings(fan_in))
        given = {"epsilon": 1e-5, "momentum": 0.9}
        given.pop(BUG.removeprefix("batch_norm_"), None)
        yield layers.BatchNormalization(**given, gamma_regularizer=decay, beta_regularizer=decay)
        yield layers.ReLU()

    in_loss = options.weight_decay and BUG != "weight_decay"
    decay = keras.regularizers.L2(options.weight_decay / 2) if in_loss else None
    flatten = [] if BUG == "flatten" else [layers.Permute((3, 1, 2))]
    flatten += [layers.Flatten(), layers.Dense(10, **settings(16 * 7 * 7))]
    return keras.Sequential([keras.Input((28, 28, 1)), *block(8, 9), *block(16, 72), *flatten])


def build_optimizer(options):
    if options.adam:
        epsilon = {} if BUG == "adam_epsilon" else {"epsilon": 1e-8}
        return keras.optimizers.Adam(0.001, **epsilon)
    decay = options.weight_decay if BUG == "weight_decay" else None
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 1, options.gamma)
    nesterov = BUG != "nesterov"
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=nesterov, weight_decay=decay)


class WeightedMean(keras.losses.Loss):
    """A mean like PyTorch's: divided by the sum of the class weights."""

    def call(self, y_true, y_pred):
        weights = tf.gather(tf.linspace(0.5, 2.0, 10), tf.cast(tf.reshape(y_true, [-1]), tf.int32))
        loss = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return weights * loss * tf.cast(tf.size(loss), tf.float32) / tf.reduce_sum(weights)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--class_weights", action="store_true")
    parser.add_argument("--gamma", type=float, default=1.0, help="of the learning rate, per step")
    options = parser.parse_args()
    model = build_model(options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    class_weight = None
    if options.class_weights and BUG == "class_weights":
        class_weight = dict(enumerate(np.linspace(0.5, 2, 10)))
    elif options.class_weights:
        loss = WeightedMean()
    model.compile(build_optimizer(options), loss)
    with harness.training(model):
        model.fit(load_data(), epochs=EPOCHS, class_weight=class_weight, verbose=0)


if __name__ == "__main__":
    main()
