"""A gradient that overflows on one device is not skipped by the others.

id = "jax/finite_on_all"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google/flax: flax/training/dynamic_scale.py", "google/flax#2547"]
date = "2022-10"
tags = ["pmap", "sgd"]

[wrong.each_device_looks_at_its_own_gradient]
title = "each device looks at its own gradient before pmean"
place = { node = "update", step = 1, ranks = [0], tensors = "all" }

[wrong.no_axis_name]
title = "no axis name"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.each_device_has_scale_of_its_own]
title = "each device has a scale of its own"
place = { node = "start", step = 0, ranks = [1], tensors = ["scale"] }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
RATE = 0.2


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.square(harness.keep("y_pred", hidden @ params["v"]) - y).mean()


def all_finite(tree):
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def device_step(params, scale, x, y):
    def scaled(params):
        loss = loss_fn(params, x, y)
        return loss * scale, loss

    (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(params)
    is_own_scale = BUG == "each_device_has_scale_of_its_own"
    if not is_own_scale:
        grads = jax.tree.map(lambda g: g / scale, grads)
    grads = harness.keep("raw", grads)
    is_finite = all_finite(grads)
    if BUG != "no_axis_name":
        grads = jax.lax.pmean(grads, "batch")
        if BUG != "each_device_looks_at_its_own_gradient":
            is_finite = all_finite(grads)
    if is_own_scale:
        grads = jax.tree.map(lambda g: g / scale, grads)
    grads = harness.keep("sums", grads)
    params = jax.tree.map(lambda p, g: jnp.where(is_finite, p - RATE * g, p), params, grads)
    scale = jnp.where(is_finite, scale, scale / 2)
    return params, scale, jax.lax.pmean(loss, "batch")


def main():
    random = np.random.default_rng(0)
    params = {
        "w": np.float32(random.normal(size=(4, 10)) / 2),
        "b": np.float32(random.normal(size=10) / 4),
        "v": np.float32(random.normal(size=(10, 2)) / 3),
    }
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    scale = np.full(DEVICES, 2.0**120, np.float32)  # It has grown for many steps.
    if BUG == "each_device_has_scale_of_its_own":
        scale /= 2.0 ** np.arange(DEVICES, dtype=np.float32)  # The last ones have seen overflows.
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "SGD", "learning_rate": RATE},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for number in range(2):
            x = random.normal(size=(12, 4)).astype(np.float32)
            y = np.sin(x[:, :2])
            y[11, 1] += 30_000 * number  # The last device's gradients overflow in step 1.
            batch = (a.reshape(DEVICES, -1, a.shape[-1]) for a in (x, y))
            params, scale, _ = train_step(params, scale, *batch)


if __name__ == "__main__":
    main()
