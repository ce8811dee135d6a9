"""Gradients of single examples are clipped and added, and noise is drawn once for their sum.

id = "jax/noise_on_sums"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google-deepmind/jax_privacy#395", "google-deepmind/optax#50"]
date = "2021-03"
tags = ["pmap", "random", "sgd"]

[wrong.mean_of_device_is_clipped]
title = "the mean of a device is clipped"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.each_device_adds_noise]
title = "each device adds noise of its own"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }

[wrong.noise_of_sum_is_added_to_mean]
title = "the noise of a sum is added to the mean"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
SIZE, HIDDEN, BATCH, RATE, LONGEST, NOISE = 6, 10, 16, 0.5, 0.4, 0.3


def loss_fn(params, x, y):
    """The loss of one example."""
    logits = jnp.tanh(x @ params["in"]) @ params["out"]
    return -jax.nn.log_softmax(logits)[y]


def clipped(grads):
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1, LONGEST / norm), grads)


def noise_like(key, params):
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(key, len(leaves))
    drawn = [jax.random.normal(k, p.shape) for k, p in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(tree, [NOISE * LONGEST * each for each in drawn])


def device_step(params, key, x, y):
    losses, grads = jax.vmap(jax.value_and_grad(loss_fn), (None, 0, 0))(params, x, y)
    if BUG == "mean_of_device_is_clipped":
        sums = clipped(jax.tree.map(lambda g: g.mean(0), grads))
        sums = jax.tree.map(lambda g: g * len(x), sums)
    else:
        sums = jax.tree.map(lambda g: g.sum(0), jax.vmap(clipped)(grads))
    if BUG == "each_device_adds_noise":
        own = jax.random.fold_in(key, jax.lax.axis_index("batch"))
        sums = jax.tree.map(jnp.add, sums, noise_like(own, params))
    sums = jax.lax.psum(harness.keep("raw", sums), "batch")
    means = jax.tree.map(lambda g: g / BATCH, sums)
    means = harness.keep("sums", means)
    noise = noise_like(key, params)
    if BUG == "each_device_adds_noise":
        noise = jax.tree.map(jnp.zeros_like, params)
    elif BUG != "noise_of_sum_is_added_to_mean":
        noise = jax.tree.map(lambda n: n / BATCH, noise)
    params = jax.tree.map(lambda p, g, n: p - RATE * (g + n), params, means, noise)
    return params, jax.lax.pmean(losses.mean(), "batch")


def main():
    random = np.random.default_rng(54)
    shapes = {"in": (SIZE, HIDDEN), "out": (HIDDEN, 3)}
    params = {name: np.float32(random.normal(size=s) / 2) for name, s in shapes.items()}
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "SGD", "learning_rate": RATE},
        arguments={"params": 0, "batch": (2, 3)},
        outputs={"params": 0, "loss": 1},
        pmap=True,
    ) as train_step:
        for number in range(2):
            x = np.float32(random.normal(size=(DEVICES, BATCH // DEVICES, SIZE)))
            y = np.int32(x[..., :3].argmax(-1))
            keys = jax.numpy.stack([jax.random.key(number)] * DEVICES)
            params, _ = train_step(params, keys, x, y)


if __name__ == "__main__":
    main()
