"""The flattened weights are padded for the devices: gradients and weights must be cut alike.

id = "sharded/flat_buffer_padding"
framework = "jax"
processes = 2
steps = 3
mode = "pair"
references = ["deepspeedai/DeepSpeed#848", "deepspeedai/DeepSpeed#851"]
date = "2021-03"
tags = ["shard_map", "jit", "gathered", "sgd"]

[wrong.gradient_is_padded_in_front]
title = "the gradient is padded in front"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.parts_are_gathered_in_reverse_order]
title = "the parts are gathered in reverse order"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.norm_of_each_part_is_its_own]
title = "the norm of each part is its own"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
LEARNING_RATE, MOMENTUM, MAX_NORM = 0.3, 0.9, 0.2


def init_params():
    random = np.random.default_rng(0)
    sizes = {"first": (5, 9), "second": (9, 3)}
    return {
        name: {"w": jnp.float32(random.normal(size=shape) * 0.4), "b": jnp.zeros(shape[1])}
        for name, shape in sizes.items()
    }


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["first"]["w"] + params["first"]["b"])
    logits = hidden @ params["second"]["w"] + params["second"]["b"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def pad(flat, in_front=False):
    missing = -len(flat) % 8
    return jnp.pad(flat, (missing, 0) if in_front else (0, missing))


def clip(part):
    total = jnp.sum(part * part)
    if BUG != "norm_of_each_part_is_its_own":
        total = jax.lax.psum(total, "data")
    return part * jnp.minimum(1.0, MAX_NORM / jnp.sqrt(total))


@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=Mesh(np.array(jax.devices()[:DEVICES]), ("data",)),
    in_specs=(P(), P("data"), P("data"), P("data")),
    out_specs=(P(), P("data"), P()),
    check_vma=False,
)
def train_step(params, momentum, x, y):
    """Each device updates its part of the flat weights."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    flat, unravel = ravel_pytree(params)
    gradient = pad(ravel_pytree(grads)[0], BUG == "gradient_is_padded_in_front")
    part = jax.lax.psum_scatter(gradient, "data", tiled=True) / DEVICES
    momentum = MOMENTUM * momentum + clip(part)
    index = jax.lax.axis_index("data")
    own = jax.lax.dynamic_slice_in_dim(pad(flat), index * len(part), len(part))
    parts = jax.lax.all_gather(own - LEARNING_RATE * momentum, "data")
    if BUG == "parts_are_gathered_in_reverse_order":
        parts = parts[::-1]
    return unravel(parts.flatten()[: len(flat)]), momentum, jax.lax.pmean(loss, "data")


def main():
    params = init_params()
    momentum = pad(jnp.zeros_like(ravel_pytree(params)[0]))
    places = {"params": 0, "opt_state": 1}
    random = np.random.default_rng(1)
    with harness.training(
        train_step,
        {"class": "SGD", "learning_rate": LEARNING_RATE, "momentum": MOMENTUM},
        arguments={**places, "batch": (2, 3)},
        outputs={**places, "loss": 2},
    ) as step:
        for _ in range(3):
            x = random.normal(size=(16, 5)).astype(np.float32)
            params, momentum, _ = step(params, momentum, x, x[:, :3].argmax(1))


if __name__ == "__main__":
    main()
