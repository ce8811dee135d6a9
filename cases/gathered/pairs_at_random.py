"""A critic tells pairs from those put together at random, by the logarithm of a mean over these.

id = "gathered/pairs_at_random"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = [
    "sungyubkim/MINE-Mutual-Information-Neural-Estimation-#3",
    "schzhu/learning-adversarially-robust-representations#3",
]
date = "2019-08"
tags = ["pmap", "sgd"]

[wrong.logarithm_is_taken_on_each_device]
title = "the logarithm is taken on each device"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.masked_pairs_count_as_one]
title = "masked pairs count as one"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.logarithm_is_left_out]
title = "the logarithm is left out"
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
SIZE, HIDDEN, BATCH, RATE, MOMENTUM = 3, 12, 16, 0.3, 0.9


def score(params, x, y):
    hidden = jax.nn.relu(x @ params["first"] + y @ params["second"] + params["bias"])
    return hidden @ params["out"]


def mean_over_devices(value):
    return value if BUG == "logarithm_is_taken_on_each_device" else jax.lax.pmean(value, "batch")


def loss_fn(params, x, y, others, masks):
    """Takes pairs, and `others` for pairs at random, of which `masks` leaves some out."""
    real = harness.keep("y_pred", score(params, x, y))
    scores = score(params, x, others)
    if BUG == "masked_pairs_count_as_one":
        exponentials = jnp.exp(masks * scores)
    else:
        exponentials = masks * jnp.exp(scores)
    mean = mean_over_devices(exponentials.mean()) / mean_over_devices(masks.mean())
    return (mean if BUG == "logarithm_is_left_out" else jnp.log(mean)) - real.mean()


def device_step(params, velocity, *batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    grads = jax.lax.pmean(harness.keep("raw", grads), "batch")
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.pmean(loss, "batch")


def main():
    random = np.random.default_rng(58)
    shapes = {"first": (SIZE, HIDDEN), "second": (SIZE, HIDDEN), "bias": (HIDDEN,)}
    shapes["out"] = (HIDDEN,)
    params = {name: np.float32(random.normal(size=s) / 2) for name, s in shapes.items()}
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    velocity = jax.tree.map(np.zeros_like, params)
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3, 4, 5)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            x = random.normal(size=(BATCH, SIZE)) * np.linspace(0.3, 2, BATCH)[:, None]
            y = x + random.normal(size=x.shape) / 3
            others = y[random.permutation(BATCH)]
            masks = np.abs(y - others).sum(1) > 1.5
            parts = (x, y, others, masks)
            batch = [np.float32(p).reshape(DEVICES, -1, *p.shape[1:]) for p in parts]
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
