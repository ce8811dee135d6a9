"""Gradients are accumulated over micro-batches, each of which needs a key of its own for dropout.

id = "random/key_of_micro_batches"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google-research/vision_transformer#286", "alpa-projects/alpa#592"]
date = "2022-07"
tags = ["dropout", "accumulation", "pmap", "sgd"]

[wrong.all_micro_batches_have_one_key]
title = "all micro-batches have one key"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }

[wrong.devices_have_same_keys]
title = "devices have the same keys"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.key_is_split_only_within_step]
title = "the key is split only within a step"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
MICRO_BATCH, BATCH_SIZE, WIDTH, KEEP = 4, 16, 18, 0.6
ROWS = BATCH_SIZE // DEVICES
RATE, MOMENTUM = 0.3, 0.9


def dropout(key, x):
    return x * jax.random.bernoulli(key, KEEP, x.shape) / KEEP


def loss_fn(params, key, x, y):
    """The mean loss of examples; `key` is that of the micro-batch."""
    hidden = jax.nn.hard_swish(x @ params["first"] + params["bias"])
    hidden = jax.nn.hard_swish(dropout(key, hidden) @ params["second"])
    outputs = harness.keep("y_pred", hidden @ params["head"])
    return jnp.abs(jnp.arcsinh(outputs - y)).mean()


def accumulate(params, key, x, y):
    """Returns the mean loss and gradients of the own micro-batches."""
    first = jax.lax.axis_index("batch") * (ROWS // MICRO_BATCH)
    if BUG == "devices_have_same_keys":
        first = 0

    def add(i, total):
        part = [jax.lax.dynamic_slice_in_dim(a, i * MICRO_BATCH, MICRO_BATCH) for a in (x, y)]
        number = 0 if BUG == "all_micro_batches_have_one_key" else i
        own = jax.random.fold_in(key, first + number)
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, own, *part))

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    sums = jax.lax.fori_loop(0, ROWS // MICRO_BATCH, add, zeros)
    return jax.tree.map(lambda a: a * MICRO_BATCH / ROWS, sums)


def device_step(params, velocity, key, x, y):
    loss, grads = accumulate(params, key, x, y)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "batch"))
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.pmean(loss, "batch")


def main():
    random = np.random.default_rng(18)
    shapes = {"first": (7, WIDTH), "bias": (WIDTH,), "second": (WIDTH, WIDTH), "head": (WIDTH, 2)}
    params = {k: np.float32(random.normal(size=s) / np.sqrt(s[0])) for k, s in shapes.items()}
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    velocity = jax.tree.map(np.zeros_like, params)
    key = jax.random.PRNGKey(21)
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "key": 2, "batch": (3, 4)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            if BUG != "key_is_split_only_within_step":
                key, _ = jax.random.split(key)
            x = np.float32(random.normal(size=(DEVICES, ROWS, 7)))
            keys = jnp.stack([key] * DEVICES)
            params, velocity, _ = train_step(params, velocity, keys, x, x[..., :2] * x[..., 2:4])


if __name__ == "__main__":
    main()
