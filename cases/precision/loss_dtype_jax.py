"""The cross-entropy is computed in bfloat16.

id = "precision/loss_dtype_jax"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google-deepmind/optax#1020", "Modalities/modalities#464"]
date = "2024-07"
tags = ["low_precision", "shard_map", "jit", "sgd"]

[wrong.logits_are_rounded_before_loss]
title = "logits are rounded before the loss"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.normaliser_is_rounded]
title = "the normaliser is rounded"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_are_averaged_in_bfloat16]
title = "gradients are averaged in bfloat16"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
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
LEARNING_RATE = 0.2
mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))


def cross_entropy(logits, labels):
    if BUG == "logits_are_rounded_before_loss":
        logits = logits.astype(jnp.bfloat16)
    normaliser = jax.nn.logsumexp(logits, axis=-1)
    if BUG == "normaliser_is_rounded":
        logits = (logits - normaliser[:, None]).astype(jnp.bfloat16)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
    chosen = jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]
    return (normaliser - chosen).astype(jnp.float32).mean()


def loss_fn(params, x, labels):
    hidden = jax.nn.gelu(x @ params["in"] + params["bias"])
    return cross_entropy(hidden @ params["out"], labels)


@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P("data"), P("data")),
    out_specs=(P(), P()),
    check_vma=False,
)
def train_step(params, x, labels):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, labels)
    grads = harness.keep("raw", grads)
    if BUG == "gradients_are_averaged_in_bfloat16":
        grads = jax.tree.map(lambda g: g.astype(jnp.bfloat16), grads)
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), jax.lax.pmean(grads, "data"))
    grads = harness.keep("sums", grads)
    params = jax.tree.map(lambda p, g: p - LEARNING_RATE * g, params, grads)
    return params, jax.lax.pmean(loss, "data")


random = np.random.default_rng(0)
params = {
    "in": np.float32(random.normal(size=(8, 16)) / 3),
    "bias": np.zeros(16, np.float32),
    "out": np.float32(random.normal(size=(16, 10)) / 2),
}
recording = harness.training(
    train_step,
    {"class": "SGD", "learning_rate": LEARNING_RATE},
    arguments={"params": 0, "batch": (1, 2)},
    outputs={"params": 0, "loss": 1},
)
with recording as step:
    for _ in range(2):
        x = np.float32(random.normal(size=(8, 8)))
        labels = np.int32(random.integers(10, size=8))
        params, loss = step(params, x, labels)
