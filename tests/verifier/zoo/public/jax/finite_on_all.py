"""A gradient that overflows on one device is not skipped by the others.

reference = "google/flax: flax/training/dynamic_scale.py, google/flax#2547"
date = "2022-10"
framework = "jax"

[wrong]
"each device looks at its own gradient before pmean" = ["overflow_not_skipped", "not_finite"]
"no axis name" = ["not_all_reduced", "diverged_replicas"]
"each device has a scale of its own" = ["other_loss_scale", "diverged_replicas"]
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

import lockstep
from lockstep import record_jax

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
RATE = 0.2


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.square(record_jax.keep("y_pred", hidden @ params["v"]) - y).mean()


def all_finite(tree):
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def device_step(params, scale, x, y):
    def scaled(params):
        loss = loss_fn(params, x, y)
        return loss * scale, loss

    (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(params)
    is_own_scale = BUG == "each device has a scale of its own"
    if not is_own_scale:
        grads = jax.tree.map(lambda g: g / scale, grads)
    grads = record_jax.keep("raw", grads)
    is_finite = all_finite(grads)
    if BUG != "no axis name":
        grads = jax.lax.pmean(grads, "batch")
        if BUG != "each device looks at its own gradient before pmean":
            is_finite = all_finite(grads)
    if is_own_scale:
        grads = jax.tree.map(lambda g: g / scale, grads)
    grads = record_jax.keep("sums", grads)
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
    if BUG == "each device has a scale of its own":
        scale /= 2.0 ** np.arange(DEVICES, dtype=np.float32)  # The last ones have seen overflows.
    with lockstep.record(
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
