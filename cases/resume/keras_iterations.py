"""Keras: weights are loaded before `compile`, so that the optimizer and its schedule start again.

id = "resume/keras_iterations"
framework = "keras"
processes = 2
steps = 4
mode = "resume"
references = [
    "keras-team/keras#22014",
    "tensorflow/tensorflow#48947",
    "tensorflow/tensorflow#49208",
]
date = "2026-01"
tags = ["mirrored", "sgd"]

[wrong.compiled_after_load]
title = "compiled after the load"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }

[wrong.iterations_start_again]
title = "iterations start again"
place = { node = "start", step = 2, ranks = "all", tensors = ["iterations"] }

[wrong.only_iterations_are_restored]
title = "only iterations are restored"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }
"""

import os

import keras
import numpy as np
import tensorflow as tf

from cases import harness

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
    if BUG == "iterations_start_again":
        model.optimizer.iterations.assign(0)
    elif BUG in ("compiled_after_load", "only_iterations_are_restored"):
        compile_model(model)
        if BUG == "only_iterations_are_restored":
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
    with harness.training(model):
        model.fit(dataset, epochs=1, shuffle=False, verbose=0)
    if SAVE:
        model.save_weights(SAVE + ".weights.h5")


main()
