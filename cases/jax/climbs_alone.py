"""Sharpness-aware minimisation takes a gradient where a step up the gradient of the batch leads.

id = "jax/climbs_alone"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["davda54/sam#18", "juntang-zhuang/GSAM#5", "mlcommons/algorithmic-efficiency#325"]
date = "2021-03"
tags = ["pmap", "sgd"]

[wrong.each_device_climbs_its_own_gradient]
title = "each device climbs its own gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.only_first_gradient_is_averaged]
title = "only the first gradient is averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.update_starts_from_where_step_up_has_led]
title = "the update starts from where the step up has led"
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
WIDTH, CHANNELS, BATCH, HEIGHT, RATE, MOMENTUM = 8, 6, 16, 0.8, 0.4, 0.9


def loss_fn(params, x, y, keep):
    """The loss of a small convolution, whose outputs are recorded where the step begins."""
    windows = jnp.stack([x[:, i : i + WIDTH - 2] for i in range(3)], -1)
    hidden = jax.nn.softplus(windows @ params["kernel"] + params["bias"]).mean(1)
    logits = hidden @ params["head"]
    if keep:
        logits = harness.keep("y_pred", logits)
    return (jax.nn.softplus(logits) - y * logits).mean()


def device_step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y, keep=True)
    if BUG != "each_device_climbs_its_own_gradient":
        grads = jax.lax.pmean(grads, "batch")
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
    above = jax.tree.map(lambda p, g: p + HEIGHT * g / norm, params, grads)
    grads = harness.keep("raw", jax.grad(loss_fn)(above, x, y, keep=False))
    if BUG != "only_first_gradient_is_averaged":
        grads = jax.lax.pmean(grads, "batch")
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    start = above if BUG == "update_starts_from_where_step_up_has_led" else params
    params = jax.tree.map(lambda p, v: p - RATE * v, start, velocity)
    return params, velocity, jax.lax.pmean(loss, "batch")


def main():
    random = np.random.default_rng(10)
    shapes = {"kernel": (3, CHANNELS), "bias": (CHANNELS,), "head": (CHANNELS, 2)}
    params = {k: np.float32(random.normal(size=s) / np.sqrt(s[0])) for k, s in shapes.items()}
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    velocity = jax.tree.map(np.zeros_like, params)
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            x = np.float32(random.normal(size=(DEVICES, BATCH // DEVICES, WIDTH)))
            y = np.float32(x[..., :2] > x[..., 2:4])
            params, velocity, _ = train_step(params, velocity, x, y)


if __name__ == "__main__":
    main()
