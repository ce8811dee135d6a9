"""BatchNorm without the name of the axis of devices has each device's own statistics.

id = "jax/batch_norm_axis"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google/flax#319", "google/flax#2417", "google/flax#877"]
date = "2020-06"
tags = ["batch_norm", "pmap", "sgd"]

[wrong.no_axis_name]
title = "no axis name"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["bn"] }

[wrong.mean_of_devices_variances]
title = "the mean of the devices' variances"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["bn"] }

[wrong.only_moving_statistics_are_each_device_own]
title = "only the moving statistics are each device's own"
place = { node = "update", step = 0, ranks = "all", tensors = ["bn/mean", "bn/var"] }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
RATE, MOMENTUM, KEPT = 0.1, 0.9, 0.9
PLACES = {"params": "0/params", "state": "0/batch_stats", "opt_state": "0/velocity"}


def batch_norm(params, stats, x):
    mean, square = x.mean(0), jnp.square(x).mean(0)
    own = mean, square - mean**2
    if BUG != "no_axis_name":
        mean, square = jax.lax.pmean((mean, square), "batch")
    variance = square - mean**2
    if BUG == "mean_of_devices_variances":
        variance = jax.lax.pmean(own[1], "batch")
    moving = own if BUG == "only_moving_statistics_are_each_device_own" else (mean, variance)
    stats = {
        "mean": KEPT * stats["mean"] + (1 - KEPT) * moving[0],
        "var": KEPT * stats["var"] + (1 - KEPT) * moving[1],
    }
    x = (x - mean) * jax.lax.rsqrt(variance + 1e-5)
    return x * params["scale"] + params["bias"], stats


def apply(params, stats, x):
    x, stats = batch_norm(params["bn"], stats["bn"], x @ params["dense"])
    return jax.nn.softplus(x) @ params["out"], {"bn": stats}


def device_step(state, x, y):
    def loss_fn(params):
        logits, stats = apply(params, state["batch_stats"], x)
        log_probs = jax.nn.log_softmax(harness.keep("y_pred", logits))
        return -jnp.take_along_axis(log_probs, y[:, None], 1).mean(), stats

    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state["params"])
    loss = harness.keep("loss", loss)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "batch"))
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state["velocity"], grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, state["params"], velocity)
    state = {"params": params, "batch_stats": stats, "velocity": velocity}
    return state, {"loss": jax.lax.pmean(loss, "batch")}


def main():
    random = np.random.default_rng(0)
    params = {
        "dense": np.float32(random.normal(size=(6, 12)) / 2),
        "bn": {"scale": np.ones(12, np.float32), "bias": np.zeros(12, np.float32)},
        "out": np.float32(random.normal(size=(12, 4)) / 3),
    }
    stats = {"bn": {"mean": np.zeros(12, np.float32), "var": np.ones(12, np.float32)}}
    state = {"params": params, "batch_stats": stats}
    state["velocity"] = jax.tree.map(np.zeros_like, params)
    state = jax.tree.map(lambda x: np.stack([x] * DEVICES), state)
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments=PLACES | {"batch": (1, 2)},
        outputs=PLACES | {"loss": "1/loss"},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            x = random.normal(size=(16, 6)).astype(np.float32)
            x[8:] += 0.7  # The examples are sorted by where they were measured.
            x = x.reshape(DEVICES, -1, 6)
            state, _ = train_step(state, x, x[..., :4].argmax(-1))


if __name__ == "__main__":
    main()
