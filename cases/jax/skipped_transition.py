"""A step whose gradients are not finite must leave weights, momentum and counts as they were.

id = "jax/skipped_transition"
framework = "jax"
processes = 2
steps = 3
mode = "pair"
references = ["mlnomadpy/flaxchat#6"]
date = "2026-08"
tags = ["accumulation", "shard_map", "jit", "sgd"]

[wrong.zeros_take_place_of_gradients]
title = "zeros take the place of the gradients"
place = { node = "update", step = 1, ranks = "all", tensors = "all" }

[wrong.bad_micro_batch_is_left_out]
title = "the bad micro-batch is left out"
place = { node = "gradient", step = 1, ranks = [1], tensors = "all" }

[wrong.each_device_decides_for_itself]
title = "each device decides for itself"
place = { node = "update", step = 1, ranks = [0], tensors = "all" }
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
MICRO_BATCHES, BATCH_SIZE, RATE, MOMENTUM = 2, 16, 0.05, 0.9


def loss_fn(params, x, y):
    """The negative log-likelihood of counts, which overflows for large rates."""
    hidden = jnp.tanh(x @ params["in"] + params["bias"])
    log_rates = harness.keep("y_pred", hidden @ params["out"] + x[:, :3])
    return (jnp.exp(log_rates) - y * log_rates).mean()


def is_finite(tree):
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def zero_unless(condition, tree):
    return jax.tree.map(lambda leaf: jnp.where(condition, leaf, 0), tree)


def accumulate(params, x, y):
    """Returns the mean loss and gradients of the device's micro-batches."""

    def add(total, part):
        loss, grads = jax.value_and_grad(loss_fn)(params, *part)
        if BUG == "bad_micro_batch_is_left_out":
            grads = zero_unless(is_finite(grads), grads)
        return jax.tree.map(jnp.add, total, (loss, grads)), None

    parts = [a.reshape(MICRO_BATCHES, -1, a.shape[-1]) for a in (x, y)]
    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    sums, _ = jax.lax.scan(add, zeros, parts)
    return jax.tree.map(lambda leaf: leaf / MICRO_BATCHES, sums)


def device_step(params, state, x, y):
    loss, own = accumulate(params, x, y)
    own = harness.keep("raw", own)
    grads = harness.keep("sums", jax.lax.pmean(own, "data"))
    ok = is_finite(own if BUG == "each_device_decides_for_itself" else grads)
    if BUG == "zeros_take_place_of_gradients":
        grads, ok = zero_unless(ok, grads), True
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, state["velocity"], grads)
    updated = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    new = updated, {"count": state["count"] + 1, "velocity": velocity}
    new = jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, (params, state))
    return *new, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    random = np.random.default_rng(2)
    params = {
        "in": np.float32(random.normal(size=(6, 14)) / 2),
        "bias": np.float32(random.normal(size=14) / 4),
        "out": np.float32(random.normal(size=(14, 3)) / 3),
    }
    state = {"count": np.int32(0), "velocity": jax.tree.map(np.zeros_like, params)}
    params, state = jax.device_put((params, state), NamedSharding(mesh, P()))
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )(device_step)
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for number in range(3):
            x = np.float32(random.normal(size=(BATCH_SIZE, 6)))
            y = np.float32(random.poisson(np.exp(x[:, 3:] / 2)))
            x[-1, 0] += 200 * (number == 1)
            batch = jax.device_put((x, y), NamedSharding(mesh, P("data")))
            params, state, _ = train_step(params, state, *batch)


if __name__ == "__main__":
    main()
