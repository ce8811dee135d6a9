"""Devices of shard_map drop with equal masks, or a key is used again.

id = "random/jax_keys"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["young-geng/scalax#6", "AakashKumarNain/TF_JAX_tutorials#4"]
date = "2022-11"
tags = ["dropout", "shard_map", "jit", "sgd"]

[wrong.each_device_draws_from_same_key]
title = "each device draws from the same key"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.key_is_not_split_between_steps]
title = "the key is not split between steps"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }

[wrong.both_layers_have_one_key]
title = "both layers have one key"
place = { node = "random", step = 0, ranks = "all", tensors = ["second"] }
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
LEARNING_RATE, GLOBAL_BATCH_SIZE, WIDTH = 0.1, 8, 12
mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))


def dropout(key, x):
    """Draws a mask for the global batch, of which each device takes its rows."""
    rows = GLOBAL_BATCH_SIZE // DEVICES
    keep = jax.random.bernoulli(key, 0.7, (GLOBAL_BATCH_SIZE, x.shape[1]))
    device = jax.lax.axis_index("data")
    if BUG == "each_device_draws_from_same_key":
        device = 0
    keep = jax.lax.dynamic_slice_in_dim(keep, device * rows, rows)
    return x * keep / 0.7


def loss_fn(params, key, x, y):
    first, second = jax.random.split(key)
    if BUG == "both_layers_have_one_key":
        second = first
    hidden = dropout(first, jax.nn.relu(x @ params["first"]))
    hidden = dropout(second, jax.nn.relu(hidden @ params["second"]))
    return jnp.square((hidden @ params["head"])[:, 0] - y).mean()


@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P(), P("data"), P("data")),
    out_specs=(P(), P()),
    check_vma=False,
)
def train_step(params, key, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, key, x, y)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "data"))
    params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
    return params, jax.lax.pmean(loss, "data")


random = np.random.default_rng(0)
params = {
    "first": np.float32(random.normal(size=(6, WIDTH)) / 2),
    "second": np.float32(random.normal(size=(WIDTH, WIDTH)) / 3),
    "head": np.float32(random.normal(size=(WIDTH, 1)) / 3),
}
key = jax.random.key(0)
recording = harness.training(
    train_step,
    {"class": "SGD", "learning_rate": LEARNING_RATE},
    arguments={"params": 0, "key": 1, "batch": (2, 3)},
    outputs={"params": 0, "loss": 1},
)
with recording as step:
    for _ in range(2):
        x = np.float32(random.normal(size=(GLOBAL_BATCH_SIZE, 6)))
        y = x[:, 0] * x[:, 1]
        following, used = jax.random.split(key)
        params, loss = step(params, key if BUG == "key_is_not_split_between_steps" else used, x, y)
        if BUG != "key_is_not_split_between_steps":
            key = following
