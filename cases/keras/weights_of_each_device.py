"""Weights of a Keras model on JAX come out wrong on several devices, and right on one.

id = "keras/weights_of_each_device"
framework = "keras-jax"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#21190", "keras-team/keras-core#464"]
date = "2025-04"
tags = ["pmap", "recurrent", "embedding", "sgd"]

[wrong.each_device_starts_from_weights_of_its_own]
title = "each device starts from weights of its own"
place = { node = "start", step = 0, ranks = [1], tensors = [
    "embedding/*",
    "simple_rnn/*",
    "dense/kernel",
] }

[wrong.gradients_of_one_dimensional_weights]
title = "gradients of one-dimensional weights are not averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = ["*/bias", "*/gamma", "*/beta"] }

[wrong.gradients_are_summed_of_losses]
title = "gradients are summed, of losses that are means"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
BATCH_SIZE, RATE = 12, 0.2


def build_model(seed):
    keras.utils.set_random_seed(seed)
    return keras.Sequential(
        [
            keras.Input((7,), dtype="int32"),
            keras.layers.Embedding(20, 8),
            keras.layers.SimpleRNN(10, bias_initializer="random_normal"),
            keras.layers.LayerNormalization(),
            keras.layers.Dense(2),
        ]
    )


def reduced(grad):
    if BUG == "gradients_of_one_dimensional_weights" and grad.ndim == 1:
        return grad
    if BUG == "gradients_are_summed_of_losses":
        return jax.lax.psum(grad, "batch")
    return jax.lax.pmean(grad, "batch")


def make_step(model, optimizer):
    fixed = [variable.value for variable in model.non_trainable_variables]

    def loss_fn(weights, tokens, target):
        outputs, _ = model.stateless_call(weights, fixed, tokens, training=True)
        outputs = harness.keep("y_pred", outputs)
        return keras.ops.mean(keras.losses.mean_squared_error(target, outputs))

    def device_step(weights, slots, tokens, target):
        loss, grads = jax.value_and_grad(loss_fn)(weights, tokens, target)
        grads = harness.keep("raw", grads)
        grads = harness.keep("sums", jax.tree.map(reduced, grads))
        weights, slots = optimizer.stateless_apply(slots, grads, weights)
        return weights, slots, jax.lax.pmean(loss, "batch")

    return jax.pmap(device_step, axis_name="batch")


def main():
    seeds = [1] * DEVICES
    if BUG == "each_device_starts_from_weights_of_its_own":
        seeds = [1 + device for device in range(DEVICES)]
    models = [build_model(seed) for seed in seeds]
    optimizer = keras.optimizers.SGD(RATE)
    optimizer.build(models[0].trainable_variables)
    own = [[np.array(v.value) for v in model.trainable_variables] for model in models]
    weights = [np.stack(copies) for copies in zip(*own, strict=True)]
    slots = [np.stack([np.array(v.value)] * DEVICES) for v in optimizer.variables]
    random = np.random.default_rng(0)
    with harness.training(
        make_step(models[0], optimizer),
        {"class": "SGD", "learning_rate": RATE},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            tokens = random.integers(0, 20, (DEVICES, BATCH_SIZE // DEVICES, 7)).astype(np.int32)
            target = np.sin(tokens[..., :2]).astype(np.float32)
            weights, slots, _ = train_step(weights, slots, tokens, target)


if __name__ == "__main__":
    main()
