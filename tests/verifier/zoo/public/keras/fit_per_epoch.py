"""An optimizer averages the weights, and replaces them by the average at the end of each fit.

reference = "keras-team/keras#18978, keras-team/keras#18972"
date = "2023-12"
framework = "keras"
steps = 4

[wrong]
"fit is called once per epoch" = ["changed_on_its_own"]
"the average replaces the weights in each step" = ["other_optimizer", "changed_on_its_own"]
"the average begins anew in each epoch" = ["reset_state", "not_restored", "other_statistics"]
"""

import os

import keras
import numpy as np
import tensorflow as tf

import lockstep

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
    is_replaced = BUG == "the average replaces the weights in each step"
    optimizer = keras.optimizers.SGD(
        0.3,
        momentum=0.9,
        use_ema=True,
        ema_momentum=0.7,
        ema_overwrite_frequency=1 if is_replaced else None,
    )
    optimizer.build(model.trainable_variables)
    model.compile(optimizer, keras.losses.CategoricalHinge())
    return model


class Restart(keras.callbacks.Callback):
    """Sets the averages to the weights at the start of each epoch."""

    def on_epoch_begin(self, epoch, logs=None):
        optimizer = self.model.optimizer
        averages = optimizer._model_variables_moving_average
        for average, weight in zip(averages, self.model.trainable_variables, strict=True):
            average.assign(weight.value)


def main():
    strategy = make_strategy()
    keras.utils.set_random_seed(7)
    x = np.random.default_rng(3).normal(size=(2 * BATCH_SIZE, 7, 2)).astype("float32")
    y = keras.utils.to_categorical((x[..., 0].sum(1) > 0) + (x[..., 1].sum(1) > 0), 3)
    with strategy.scope():
        model = build_model()
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH_SIZE)
    callbacks = [Restart()] if BUG == "the average begins anew in each epoch" else []
    with lockstep.record(model):
        if BUG == "fit is called once per epoch":
            for _ in range(EPOCHS):
                model.fit(dataset, epochs=1, verbose=0)
        else:
            model.fit(dataset, epochs=EPOCHS, verbose=0, callbacks=callbacks)


if __name__ == "__main__":
    main()
