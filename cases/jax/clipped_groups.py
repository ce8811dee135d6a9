"""Experts are split over devices, and gradients are clipped in groups, not once by their norm.

id = "jax/clipped_groups"
framework = "jax"
processes = 4
steps = 2
mode = "pair"
references = ["marin-community/marin#6160"]
date = "2026-06"
tags = ["experts", "shard_map", "jit", "sgd"]

[wrong.each_group_is_clipped_by_its_own_norm]
title = "each group is clipped by its own norm"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.copied_weights_count_once_for_each_device]
title = "copied weights count once for each device"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
EXPERTS, WIDTH, HIDDEN, LIMIT = 4, 10, 8, 0.1
RATE, MOMENTUM = 1.0, 0.8
SPLIT = {"up": P("expert"), "down": P("expert")}
COPIED = {"gate": P(), "embed": P(), "head": P()}


def predict(params, x):
    """Each expert works on all rows, and the gate weights them."""
    x = x @ params["embed"]
    weights = jax.nn.softmax(x @ params["gate"])
    hidden = jax.nn.gelu(jnp.einsum("bw,ewh->beh", x, params["up"]))
    outputs = jnp.einsum("beh,ehw->bew", hidden, params["down"])
    return (x + jnp.einsum("be,bew->bw", weights, outputs)) @ params["head"]


def loss_fn(params, x, y):
    errors = harness.keep("y_pred", predict(params, x)) - y
    return jnp.log(jnp.cosh(errors)).sum(1).mean()


def make_clip(mesh):
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(SPLIT | COPIED,), out_specs=P(), check_vma=False
    )
    def square(grads):
        squares = {name: jnp.square(gradient).sum() for name, gradient in grads.items()}
        split = sum(squares[name] for name in SPLIT if name in squares)
        copied = sum(squares[name] for name in COPIED if name in squares)
        if BUG == "copied_weights_count_once_for_each_device":
            return jax.lax.psum(split + copied, "expert")
        return jax.lax.psum(split, "expert") + copied

    def clip(grads):
        zeros = jax.tree.map(jnp.zeros_like, grads)
        groups = [[*grads]]
        if BUG == "each_group_is_clipped_by_its_own_norm":
            groups = [[*SPLIT], [*COPIED]]
        clipped = {}
        for group in groups:
            own = zeros | {name: grads[name] for name in group}
            factor = jnp.minimum(1, LIMIT / jnp.sqrt(square(own)))
            clipped |= {name: factor * grads[name] for name in group}
        return {name: clipped[name] for name in grads}

    return clip


def main():
    shape = (2, DEVICES // 2) if DEVICES > 1 else (1, 1)
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "expert"))
    random = np.random.default_rng(6)
    shapes = {
        "up": (EXPERTS, WIDTH, HIDDEN),
        "down": (EXPERTS, HIDDEN, WIDTH),
        "gate": (WIDTH, EXPERTS),
        "embed": (5, WIDTH),
        "head": (WIDTH, 3),
    }
    params = {name: np.float32(random.normal(size=s) / 3) for name, s in shapes.items()}
    places = {name: NamedSharding(mesh, spec) for name, spec in (SPLIT | COPIED).items()}
    params = jax.device_put(params, places)
    velocity = jax.tree.map(jnp.zeros_like, params)
    clip = make_clip(mesh)

    @jax.jit
    def step(params, velocity, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        grads = harness.keep("clipped", clip(harness.keep("sums", grads)))
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
        params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
        return params, velocity, loss

    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            x = np.float32(random.normal(size=(16, 5)))
            batch = x, np.float32(np.sin(2 * x[:, :3]) + x[:, 2:])
            batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
