"""A reward model is scaled before its training, so that rewards have a mean of 0 and deviation 1.

id = "jax/gain_of_rewards"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["vwxyzjn/lm-human-preference-details#17"]
date = "2023-09"
tags = ["pmap", "adam"]

[wrong.each_device_scales_by_its_own_samples]
title = "each device scales by its own samples"
place = { node = "start", step = 0, ranks = "all", tensors = ["gain", "bias"] }

[wrong.deviations_of_devices_are_averaged]
title = "deviations of the devices are averaged"
place = { node = "start", step = 0, ranks = "all", tensors = ["gain", "bias"] }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
WIDTH, HIDDEN, BATCH, SAMPLES = 7, 12, 20, 16
RATE, BETA_1, BETA_2, EPSILON = 0.03, 0.9, 0.95, 1e-3


def rewards_of(params, x):
    rewards = jnp.sin(x @ params["in"]) @ params["out"]
    return params["gain"] * rewards + params["bias"]


def scale(params, samples):
    """Returns the weights with another gain and bias; each device has a part of the samples."""
    rewards = rewards_of(params, samples)
    mean, square = rewards.mean(), jnp.square(rewards).mean()
    if BUG == "deviations_of_devices_are_averaged":
        mean, deviation = jax.lax.pmean((mean, rewards.std()), "batch")
    else:
        if BUG != "each_device_scales_by_its_own_samples":
            mean, square = jax.lax.pmean((mean, square), "batch")
        deviation = jnp.sqrt(square - mean**2)
    return params | {"gain": params["gain"] / deviation, "bias": -mean / deviation}


def loss_fn(params, x, y):
    rewards = harness.keep("y_pred", rewards_of(params, x))
    return (jax.nn.softplus(rewards) - y * rewards).mean()


def device_step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "batch"))
    count = state["count"] + 1
    first = jax.tree.map(lambda m, g: BETA_1 * m + (1 - BETA_1) * g, state["mu"], grads)
    second = jax.tree.map(lambda v, g: BETA_2 * v + (1 - BETA_2) * g * g, state["nu"], grads)

    def update(p, m, v):
        m, v = m / (1 - BETA_1**count), v / (1 - BETA_2**count)
        return p - RATE * m / (jnp.sqrt(v) + EPSILON)

    params = jax.tree.map(update, params, first, second)
    return params, {"count": count, "mu": first, "nu": second}, jax.lax.pmean(loss, "batch")


def main():
    random = np.random.default_rng(5)
    params = {
        "in": np.float32(random.normal(size=(WIDTH, HIDDEN))),
        "out": np.float32(random.normal(size=HIDDEN)),
        "gain": np.float32(1),
        "bias": np.float32(0),
    }
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    samples = np.float32(random.normal(size=(SAMPLES, WIDTH)))
    samples[: SAMPLES // 2] *= 0.2  # Prompts of another kind.
    samples = samples.reshape(DEVICES, -1, WIDTH)
    params = jax.pmap(scale, axis_name="batch")(params, samples)
    zeros = jax.tree.map(jnp.zeros_like, params)
    state = {"count": np.zeros(DEVICES, np.float32), "mu": zeros, "nu": zeros}
    optimizer = {"class": "Adam", "learning_rate": RATE, "epsilon": EPSILON}
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        optimizer | {"beta_1": BETA_1, "beta_2": BETA_2},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            x = np.float32(random.normal(size=(DEVICES, BATCH // DEVICES, WIDTH)))
            y = np.float32(x[..., 0] > x[..., 1])
            params, state, _ = train_step(params, state, x, y)


if __name__ == "__main__":
    main()
