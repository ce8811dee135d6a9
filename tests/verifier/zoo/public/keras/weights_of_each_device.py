"""Weights of a Keras model on JAX come out wrong on several devices, and right on one.

reference = "keras-team/keras#21190, keras-team/keras-core#464"
date = "2025-04"
framework = "keras-jax"

[wrong]
"each device starts from weights of its own" = ["diverged_replicas", "other_initial_weights"]
"gradients of one-dimensional weights are not averaged" = [
    "partly_all_reduced",
    "diverged_replicas",
]
"gradients are summed, of losses that are means" = ["sum_instead_of_mean"]
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np

import lockstep
from lockstep import record_jax

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
    if BUG == "gradients of one-dimensional weights are not averaged" and grad.ndim == 1:
        return grad
    if BUG == "gradients are summed, of losses that are means":
        return jax.lax.psum(grad, "batch")
    return jax.lax.pmean(grad, "batch")


def make_step(model, optimizer):
    fixed = [variable.value for variable in model.non_trainable_variables]

    def loss_fn(weights, tokens, target):
        outputs, _ = model.stateless_call(weights, fixed, tokens, training=True)
        outputs = record_jax.keep("y_pred", outputs)
        return keras.ops.mean(keras.losses.mean_squared_error(target, outputs))

    def device_step(weights, slots, tokens, target):
        loss, grads = jax.value_and_grad(loss_fn)(weights, tokens, target)
        grads = record_jax.keep("raw", grads)
        grads = record_jax.keep("sums", jax.tree.map(reduced, grads))
        weights, slots = optimizer.stateless_apply(slots, grads, weights)
        return weights, slots, jax.lax.pmean(loss, "batch")

    return jax.pmap(device_step, axis_name="batch")


def main():
    seeds = [1] * DEVICES
    if BUG == "each device starts from weights of its own":
        seeds = [1 + device for device in range(DEVICES)]
    models = [build_model(seed) for seed in seeds]
    optimizer = keras.optimizers.SGD(RATE)
    optimizer.build(models[0].trainable_variables)
    own = [[np.array(v.value) for v in model.trainable_variables] for model in models]
    weights = [np.stack(copies) for copies in zip(*own, strict=True)]
    slots = [np.stack([np.array(v.value)] * DEVICES) for v in optimizer.variables]
    random = np.random.default_rng(0)
    with lockstep.record(
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
