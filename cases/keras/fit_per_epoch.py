"""An optimizer averages the weights; the averages replace them after an epoch and after a fit.

id = "keras/fit_per_epoch"
framework = "keras"
processes = 2
steps = 4
mode = "pair"
references = ["keras-team/keras#18978", "keras-team/keras#18972"]
date = "2023-12"
tags = ["mirrored", "averages", "sgd"]

[wrong.fit_is_called_once_per_epoch]
title = "fit is called once per epoch"
place = { node = "between", step = 1, ranks = "all", tensors = "all" }

[wrong.weights_and_averages_are_not_swapped_back]
title = "weights and averages are not swapped back"
place = { node = "between", step = 1, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
BATCH_SIZE, EPOCHS = 12, 2


def make_strategy():
    cpu = tf.config.list_physical_devices("CPU")[0]
    parts = [tf.config.LogicalDeviceConfiguration()] * DEVICES
    tf.config.set_logical_device_configuration(cpu, parts)
    return tf.distribute.MirroredStrategy(
        [f"CPU:{i}" for i in range(DEVICES)],
        cross_device_ops=tf.distribute.ReductionToOneDevice(),
    )


def build_model():
    layers = [
        keras.layers.Conv1D(8, 3, padding="same", activation="selu"),
        keras.layers.GlobalAveragePooling1D(),
        keras.layers.Dense(3),
    ]
    model = keras.Sequential([keras.Input((7, 2)), *layers])
    optimizer = keras.optimizers.SGD(0.3, momentum=0.9, use_ema=True, ema_momentum=0.7)
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, keras.losses.CategoricalHinge())
    return model


class SwapOnce(keras.callbacks.SwapEMAWeights):
    """Swaps weights and averages at the end of an epoch, for its evaluation."""

    def on_epoch_begin(self, epoch, logs=None):
        self._ema_weights_in_model = False


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(7)
    x = np.random.default_rng(3).normal(size=(2 * BATCH_SIZE, 7, 2)).astype("float32")
    y = keras.utils.to_categorical((x.sum(1) > 0).sum(1), 3)
    with strategy.scope():
        model = build_model()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    swap = keras.callbacks.SwapEMAWeights
    if BUG == "weights_and_averages_are_not_swapped_back":
        swap = SwapOnce
    callbacks = [swap(swap_on_epoch=True)]
    with harness.training(model):
        if BUG == "fit_is_called_once_per_epoch":
            for _ in range(EPOCHS):
                model.fit(dataset, epochs=1, verbose=0, callbacks=callbacks)
        else:
            model.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main()
