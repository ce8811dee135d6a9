"""A trainer maps its step over devices, and each device updates with gradients of its own.

id = "jax/trainer_without_mean"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["HenryNdubuaku/nanodl#12"]
date = "2024-02"
tags = ["pmap", "sgd"]

[wrong.gradients_are_not_averaged]
title = "gradients are not averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
WORDS, WIDTH, LENGTH, BATCH, RATE, MOMENTUM = 9, 8, 5, 12, 0.5, 0.9


def loss_fn(params, words):
    x = params["table"][words[:, :-1]]
    x = x + jnp.tanh(jnp.cumsum(x, axis=1) @ params["mix"])
    logits = harness.keep("y_pred", x @ params["head"])
    chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), words[:, 1:, None], axis=2)
    return -chosen.mean()


def device_step(params, velocity, words):
    loss, grads = jax.value_and_grad(loss_fn)(params, words)
    grads = harness.keep("raw", grads)
    if not BUG:
        grads = jax.lax.pmean(grads, "devices")
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.pmean(loss, "devices")


def main():
    random = np.random.default_rng(31)
    shapes = {"table": (WORDS, WIDTH), "mix": (WIDTH, WIDTH), "head": (WIDTH, WORDS)}
    params = {name: np.float32(random.normal(size=shape) / 2) for name, shape in shapes.items()}
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    velocity = jax.tree.map(jnp.zeros_like, params)
    with harness.training(
        jax.pmap(device_step, axis_name="devices"),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": 2},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            words = random.integers(WORDS, size=(DEVICES, BATCH // DEVICES, LENGTH))
            params, velocity, _ = train_step(params, velocity, np.int32(words))


if __name__ == "__main__":
    main()
