"""Trains the CNN of port_torch.py with Keras; --default=NAME leaves a default of Keras as it is.

PYTHONPATH=. python port_keras.py --trace=keras.npz --replay=torch.npz
python -m lockstep torch.npz keras.npz permuted.npz

prints that the port differs by design: unbiased variance; no fault found. Without --replay, the
initial weights are compared, too.
"""

import argparse

import keras
import numpy as np
import tensorflow as tf
from keras import layers

from lockstep import record_keras

STEPS = [0, 1, 2, 9, 10]
DEFAULTS = [
    "initialisers", "batch_norm_epsilon", "batch_norm_momentum", "weight_decay", "nesterov",
    "padding", "class_weights", "adam_epsilon", "flatten",
]  # fmt: skip


def load_data(drop_remainder):
    generator = np.random.default_rng(0)
    labels = generator.integers(10, size=300)
    images = generator.random((300, 1, 28, 28)) + 0.1 * labels[:, None, None, None]
    images = images.transpose(0, 2, 3, 1).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(32, drop_remainder)


def build_model(options):
    def settings(fan_in):
        """Returns the initialisers of PyTorch, and its weight decay as a part of the loss."""
        given = {}
        if options.default != "initialisers":
            limit = fan_in**-0.5
            given["kernel_initializer"] = keras.initializers.RandomUniform(-limit, limit)
            given["bias_initializer"] = keras.initializers.RandomUniform(-limit, limit)
        return given | {"kernel_regularizer": decay, "bias_regularizer": decay}

    def block(filters, fan_in):
        if options.default != "padding":
            yield layers.ZeroPadding2D(1)
        padding = "same" if options.default == "padding" else "valid"
        yield layers.Conv2D(filters, 3, strides=2, padding=padding, **settings(fan_in))
        given = {"epsilon": 1e-5, "momentum": 0.9}
        given.pop(options.default.removeprefix("batch_norm_"), None)
        yield layers.BatchNormalization(**given, gamma_regularizer=decay, beta_regularizer=decay)
        yield layers.ReLU()

    in_loss = options.weight_decay and options.default != "weight_decay"
    decay = keras.regularizers.L2(options.weight_decay / 2) if in_loss else None
    flatten = [layers.Permute((3, 1, 2))] * (options.default != "flatten") + [layers.Flatten()]
    dense = layers.Dense(10, **settings(16 * 7 * 7))
    return keras.Sequential(
        [keras.Input((28, 28, 1)), *block(8, 9), *block(16, 72), *flatten, dense]
    )


def build_optimizer(options):
    if options.adam:
        epsilon = {} if options.default == "adam_epsilon" else {"epsilon": 1e-8}
        return keras.optimizers.Adam(0.001, **epsilon)
    decay = options.weight_decay if options.default == "weight_decay" else None
    rate = keras.optimizers.schedules.ExponentialDecay(0.05, 1, options.gamma)
    nesterov = options.default != "nesterov"
    return keras.optimizers.SGD(rate, momentum=0.9, nesterov=nesterov, weight_decay=decay)


class WeightedMean(keras.losses.Loss):
    """A mean like PyTorch's: divided by the sum of the class weights."""

    def call(self, y_true, y_pred):
        weights = tf.gather(tf.linspace(0.5, 2.0, 10), tf.cast(tf.reshape(y_true, [-1]), tf.int32))
        loss = keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)
        return weights * loss * tf.cast(tf.size(loss), tf.float32) / tf.reduce_sum(weights)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--default", choices=DEFAULTS, default="")
    parser.add_argument("--adam", action="store_true")
    parser.add_argument("--weight_decay", type=float, default=0.0)
    parser.add_argument("--class_weights", action="store_true")
    parser.add_argument("--gamma", type=float, default=1.0)
    parser.add_argument("--drop_remainder", action="store_true")
    parser.add_argument("--trace", required=True)
    parser.add_argument("--replay")
    options = parser.parse_args()
    model = build_model(options)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    class_weight = None
    if options.default == "class_weights":
        class_weight = dict(enumerate(np.linspace(0.5, 2, 10)))
    elif options.class_weights:
        loss = WeightedMean()
    model.compile(build_optimizer(options), loss)
    with record_keras.record(options.trace, model, steps=STEPS, replay=options.replay):
        model.fit(load_data(options.drop_remainder), epochs=2, class_weight=class_weight, verbose=2)


if __name__ == "__main__":
    main()
