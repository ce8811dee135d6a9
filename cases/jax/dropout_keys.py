"""The key of dropout is not folded with what differs between devices.

id = "jax/dropout_keys"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["AakashKumarNain/TF_JAX_tutorials#2"]
date = "2021-10"
tags = ["shard_map", "jit"]
note = "Each example has a key of its own, so that one device draws the masks of several."

[wrong.masks_depend_on_row_within_device]
title = "masks depend on the row within the device"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.key_is_same_in_each_step]
title = "the key is the same in each step"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }
"""

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
WIDTH, KEPT, RATE, DECAY = 16, 0.7, 0.02, 0.9


def init():
    random = np.random.default_rng(0)
    shapes = {"enter": (6, WIDTH), "middle": (WIDTH, WIDTH), "leave": (WIDTH, 3)}
    return {name: np.float32(random.normal(size=s) / np.sqrt(s[0])) for name, s in shapes.items()}


def model(params, key, x):
    """Returns the logits of one example."""
    keys = jax.random.split(key)
    for name, own in zip(("enter", "middle"), keys, strict=True):
        x = jnp.tanh(x @ params[name])
        x = jnp.where(jax.random.bernoulli(own, KEPT, x.shape), x / KEPT, 0)
    return x @ params["leave"]


def device_step(params, state, key, x, y, ids):
    step_key, next_key = jax.random.split(key)
    if BUG == "key_is_same_in_each_step":
        next_key = key
    if BUG == "masks_depend_on_row_within_device":
        ids = jnp.arange(len(ids))
    keys = jax.vmap(jax.random.fold_in, (None, 0))(step_key, ids)

    def loss_fn(params):
        logits = harness.keep("y_pred", jax.vmap(model, (None, 0, 0))(params, keys, x))
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "data"))
    state = jax.tree.map(lambda s, g: DECAY * s + (1 - DECAY) * g * g, state, grads)
    params = jax.tree.map(lambda p, s, g: p - RATE * g / (jnp.sqrt(s) + 1e-3), params, state, grads)
    return params, state, next_key, jax.lax.pmean(loss, "data")


mesh = Mesh(np.array(jax.devices()), ("data",))
step = jax.jit(
    jax.shard_map(
        device_step,
        mesh=mesh,
        in_specs=(P(), P(), P(), P("data"), P("data"), P("data")),
        out_specs=P(),
        check_vma=False,
    )
)
params = init()
state = jax.tree.map(np.zeros_like, params)
key = jax.random.PRNGKey(3)
x = np.random.default_rng(1).normal(size=(16, 6)).astype(np.float32)  # Both steps' examples.
y, ids = x[:, :3].argmax(1), np.arange(16)
with harness.training(
    step,
    {"class": "RMSprop", "learning_rate": RATE, "rho": DECAY, "epsilon": 1e-3},
    arguments={"params": 0, "opt_state": 1, "key": 2, "batch": (3, 4, 5)},
    outputs={"params": 0, "opt_state": 1, "key": 2, "loss": 3},
) as train_step:
    for _ in range(2):
        params, state, key, _ = train_step(params, state, key, x, y, ids)
