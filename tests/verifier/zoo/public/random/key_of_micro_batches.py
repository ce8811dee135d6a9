"""Gradients are accumulated over micro-batches, each of which needs a key of its own for dropout.

reference = "google-research/vision_transformer#286, alpa-projects/alpa#592"
date = "2022-07"
framework = "jax"

[wrong]
"all micro-batches have one key" = ["random_numbers_repeated", "other_random_numbers"]
"devices have the same keys" = ["same_random_numbers"]
"the key is split only within a step" = ["random_numbers_repeated"]
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
MICRO_BATCH, BATCH_SIZE, WIDTH, KEEP = 4, 16, 18, 0.6
ROWS = BATCH_SIZE // DEVICES
RATE, MOMENTUM = 0.3, 0.9


def dropout(key, x):
    return x * jax.random.bernoulli(key, KEEP, x.shape) / KEEP


def loss_fn(params, key, x, y):
    """The mean loss of examples; `key` is that of the micro-batch."""
    hidden = jax.nn.hard_swish(x @ params["first"] + params["bias"])
    hidden = jax.nn.hard_swish(dropout(key, hidden) @ params["second"])
    outputs = record_jax.keep("y_pred", hidden @ params["head"])
    return jnp.abs(jnp.arcsinh(outputs - y)).mean()


def accumulate(params, key, x, y):
    """Returns the mean loss and gradients of the own micro-batches."""
    first = jax.lax.axis_index("batch") * (ROWS // MICRO_BATCH)
    if BUG == "devices have the same keys":
        first = 0

    def add(i, total):
        part = [jax.lax.dynamic_slice_in_dim(a, i * MICRO_BATCH, MICRO_BATCH) for a in (x, y)]
        number = 0 if BUG == "all micro-batches have one key" else i
        own = jax.random.fold_in(key, first + number)
        return jax.tree.map(jnp.add, total, jax.value_and_grad(loss_fn)(params, own, *part))

    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    sums = jax.lax.fori_loop(0, ROWS // MICRO_BATCH, add, zeros)
    return jax.tree.map(lambda a: a * MICRO_BATCH / ROWS, sums)


def device_step(params, velocity, key, x, y):
    loss, grads = accumulate(params, key, x, y)
    grads = record_jax.keep("raw", grads)
    grads = record_jax.keep("sums", jax.lax.pmean(grads, "batch"))
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
    with lockstep.record(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "key": 2, "batch": (3, 4)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            if BUG != "the key is split only within a step":
                key, _ = jax.random.split(key)
            x = np.float32(random.normal(size=(DEVICES, ROWS, 7)))
            keys = jnp.stack([key] * DEVICES)
            params, velocity, _ = train_step(params, velocity, keys, x, x[..., :2] * x[..., 2:4])


if __name__ == "__main__":
    main()
