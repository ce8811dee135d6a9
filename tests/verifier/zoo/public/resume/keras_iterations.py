"""Keras: weights are loaded before `compile`, so that the optimizer and its schedule start again.

reference = "keras-team/keras#22014, tensorflow/tensorflow#48947, tensorflow/tensorflow#49208"
date = "2026-01"
framework = "keras"
resume = true
steps = 4

[wrong]
"compiled after the load" = ["not_restored", "reset_state", "other_learning_rate"]
"iterations start again" = ["other_learning_rate", "not_restored", "other_initial_state"]
"only iterations are restored" = ["not_restored", "reset_state", "other_initial_state"]
"""

import os

import keras
import numpy as np
import tensorflow as tf

import lockstep

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
DEVICES = int(os.environ.get("DEVICES", 1))
STEPS, HALF, BATCH = 4, 2, 16


def compile_model(model):
    schedule = keras.optimizers.schedules.ExponentialDecay(0.2, 1, 0.6)
    optimizer = keras.optimizers.SGD(schedule, momentum=0.9)
    model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    optimizer.build(model.trainable_variables)


def load(model):
    model.load_weights(LOAD + ".weights.h5")
    if BUG == "iterations start again":
        model.optimizer.iterations.assign(0)
    elif BUG in ("compiled after the load", "only iterations are restored"):
        compile_model(model)
        if BUG == "only iterations are restored":
            model.optimizer.iterations.assign(HALF)


def main():
    cpu = tf.config.list_physical_devices("CPU")[0]
    one = tf.config.LogicalDeviceConfiguration()
    tf.config.set_logical_device_configuration(cpu, [one] * DEVICES)
    names = [f"CPU:{i}" for i in range(DEVICES)]
    reduction = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(names, cross_device_ops=reduction)
    keras.utils.set_random_seed(3)
    x = np.random.default_rng(1).normal(size=(STEPS * BATCH, 8)).astype("float32")
    y = x[:, :4].argmax(1)
    with strategy.scope():
        layers = [keras.layers.Dense(14, "tanh"), keras.layers.Dense(4)]
        model = keras.Sequential([keras.Input((8,)), *layers])
        compile_model(model)
        if LOAD:
            load(model)
    own = slice(HALF * BATCH if LOAD else 0, HALF * BATCH if SAVE else STEPS * BATCH)
    dataset = tf.data.Dataset.from_tensor_slices((x[own], y[own])).batch(BATCH)
    with lockstep.record(model):
        model.fit(dataset, epochs=1, shuffle=False, verbose=0)
    if SAVE:
        model.save_weights(SAVE + ".weights.h5")


main()
