"""Gradients are accumulated over parts of the batch, and clipped before the whole is there.

id = "jax/clipped_parts"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google/praxis#6"]
date = "2023-02"
tags = ["shard_map", "jit", "sgd"]

[wrong.each_part_is_clipped]
title = "each part is clipped"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.each_device_clips_before_mean_over_devices]
title = "each device clips before the mean over devices"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
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
PARTS, BATCH, LIMIT, RATE, MOMENTUM = 2, 16, 0.2, 0.4, 0.9


def init():
    random = np.random.default_rng(2)
    sizes = {"first": (6, 18), "second": (18, 9), "third": (9, 2)}
    return {name: np.float32(random.normal(size=s) / np.sqrt(s[0])) for name, s in sizes.items()}


def loss_fn(params, x, y):
    for name in ("first", "second"):
        x = jax.nn.swish(x @ params[name])
    return jnp.square(x @ params["third"] - y).sum(-1).mean()


def clip(grads):
    norm = jnp.sqrt(sum(jnp.square(g).sum() for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1, LIMIT / norm), grads)


def device_step(params, velocity, x, y):
    def add_part(total, part):
        loss, grads = jax.value_and_grad(loss_fn)(params, *part)
        if BUG == "each_part_is_clipped":
            grads = clip(grads)
        return jax.tree.map(jnp.add, total, grads), loss

    parts = jax.tree.map(lambda a: a.reshape(-1, PARTS, a.shape[-1]).swapaxes(0, 1), (x, y))
    total, losses = jax.lax.scan(add_part, jax.tree.map(jnp.zeros_like, params), parts)
    grads = jax.tree.map(lambda g: g / PARTS, total)
    grads = harness.keep("raw", grads)
    if BUG == "each_device_clips_before_mean_over_devices":
        grads = clip(grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "data"))
    if not BUG:
        grads = harness.keep("clipped", clip(grads))
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.pmean(losses.mean(), "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    step = jax.shard_map(
        device_step,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )
    params = init()
    velocity = jax.tree.map(np.zeros_like, params)
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        random = np.random.default_rng(0)
        for _ in range(2):
            x = np.float32(random.normal(size=(BATCH, 6)))
            x[BATCH // 2 :] *= 3
            x[1::4] += 1
            params, velocity, _ = train_step(params, velocity, x, np.sin(x[:, :2]))


if __name__ == "__main__":
    main()
