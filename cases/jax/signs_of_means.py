"""An optimizer takes the sign of a moving gradient, and it is the sign of the mean over devices.

id = "jax/signs_of_means"
framework = "jax"
processes = 4
steps = 3
mode = "pair"
tags = ["pmap", "lion"]

[wrong.signs_of_devices_are_averaged]
title = "signs of devices are averaged"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.devices_vote]
title = "devices vote on the sign"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.momentum_takes_gradient_of_device]
title = "the momentum takes the gradient of a device"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
SIZE, HIDDEN, BATCH, RATE, BETA_1, BETA_2 = 6, 12, 16, 0.01, 0.9, 0.95


def loss_fn(params, x, y):
    outputs = jax.nn.gelu(x @ params["in"] + params["bias"]) @ params["out"]
    return jnp.square(harness.keep("y_pred", outputs) - y).mean()


def device_step(params, momentum, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    own = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(own, "batch"))
    is_own = BUG in ("signs_of_devices_are_averaged", "devices_vote")
    signs = jax.tree.map(
        lambda m, g: jnp.sign(BETA_1 * m + (1 - BETA_1) * g), momentum, own if is_own else grads
    )
    if is_own:
        signs = jax.lax.pmean(signs, "batch")
    if BUG == "devices_vote":
        signs = jax.tree.map(jnp.sign, signs)
    new = own if BUG == "momentum_takes_gradient_of_device" else grads
    momentum = jax.tree.map(lambda m, g: BETA_2 * m + (1 - BETA_2) * g, momentum, new)
    params = jax.tree.map(lambda p, s: p - RATE * s, params, signs)
    return params, momentum, jax.lax.pmean(loss, "batch")


def main():
    random = np.random.default_rng(57)
    shapes = {"in": (SIZE, HIDDEN), "bias": (HIDDEN,), "out": (HIDDEN, 2)}
    params = {name: np.float32(random.normal(size=s) / 2) for name, s in shapes.items()}
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    momentum = jax.tree.map(np.zeros_like, params)
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "Lion", "learning_rate": RATE, "beta_1": BETA_1, "beta_2": BETA_2},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(3):
            x = np.float32(random.normal(size=(DEVICES, BATCH // DEVICES, SIZE)))
            y = np.sin(x[..., :2] + x[..., 2:4])
            params, momentum, _ = train_step(params, momentum, x, y)


if __name__ == "__main__":
    main()
