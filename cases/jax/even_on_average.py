"""Predictions are to be sure one by one, and even on average over the examples of all devices.

id = "jax/even_on_average"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
tags = ["pmap", "sgd"]

[wrong.average_is_that_of_device]
title = "the average is that of a device"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.average_has_no_gradient]
title = "the average has no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.entropy_of_average_is_summed_over_devices]
title = "the entropy of the average is summed over devices"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
SIZE, HIDDEN, CLUSTERS, BATCH, RATE, MOMENTUM = 5, 12, 4, 16, 0.4, 0.9


def entropy(chances):
    return -(chances * jnp.log(chances + 1e-6)).sum(-1)


def loss_fn(params, x):
    logits = jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"]
    chances = jax.nn.softmax(2 * harness.keep("y_pred", logits))
    average = chances.mean(0)
    if BUG != "average_is_that_of_device":
        average = jax.lax.pmean(average, "batch")
    if BUG == "average_has_no_gradient":
        average = jax.lax.stop_gradient(average)
    evenness = entropy(average)
    if BUG == "entropy_of_average_is_summed_over_devices":
        evenness *= DEVICES
    return entropy(chances).mean() - evenness


def device_step(params, velocity, x):
    loss, grads = jax.value_and_grad(loss_fn)(params, x)
    grads = jax.lax.pmean(harness.keep("raw", grads), "batch")
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.pmean(loss, "batch")


def main():
    random = np.random.default_rng(55)
    shapes = {"in": (SIZE, HIDDEN), "bias": (HIDDEN,), "out": (HIDDEN, CLUSTERS)}
    params = {name: np.float32(random.normal(size=s)) for name, s in shapes.items()}
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    velocity = jax.tree.map(np.zeros_like, params)
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": 2},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            x = random.normal(size=(BATCH, SIZE)) + np.linspace(-1, 1, BATCH)[:, None]
            x = np.float32(x).reshape(DEVICES, -1, SIZE)
            params, velocity, _ = train_step(params, velocity, x)


if __name__ == "__main__":
    main()
