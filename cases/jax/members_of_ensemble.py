"""Members of an ensemble are spread over devices; each learns alone, from draws of its own.

id = "jax/members_of_ensemble"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
tags = ["shard_map", "jit", "random", "sgd"]

[wrong.gradients_are_averaged_over_members]
title = "gradients are averaged over members"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.members_of_devices_draw_alike]
title = "members of devices draw alike"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.losses_are_averaged_over_own_members]
title = "losses are averaged over the own members"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
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
MEMBERS, SIZE, HIDDEN, BATCH, RATE, MOMENTUM = 4, 5, 8, 16, 0.3, 0.9
SPECS = {"in": P("members"), "bias": P("members"), "out": P("members")}


def error(params, weights, x, y):
    outputs = jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"]
    return (weights * jnp.square(outputs - y)).mean()


def loss_fn(params, weights, x, y):
    """Returns the sum over the own members, none of which has a weight of another."""
    losses = jax.vmap(error, (0, 0, None, None))(params, weights, x, y)
    is_mean = BUG == "losses_are_averaged_over_own_members"
    return losses.mean() if is_mean else losses.sum()


def draw(key):
    """Returns how often each member has drawn each example."""
    numbers = jnp.arange(MEMBERS // DEVICES)
    if BUG != "members_of_devices_draw_alike":
        numbers += jax.lax.axis_index("members") * len(numbers)
    keys = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers)
    return jax.vmap(lambda k: jax.random.poisson(k, 1.0, (BATCH,)))(keys).astype(jnp.float32)


def device_step(params, velocity, key, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, draw(key), x, y)
    if BUG == "gradients_are_averaged_over_members":
        grads = jax.lax.pmean(grads, "members")
    grads = harness.keep("sums", grads, SPECS)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.psum(loss, "members") / MEMBERS


def main():
    mesh = Mesh(np.array(jax.devices()), ("members",))
    random = np.random.default_rng(53)
    shapes = {"in": (MEMBERS, SIZE, HIDDEN), "bias": (MEMBERS, HIDDEN), "out": (MEMBERS, HIDDEN)}
    params = {name: np.float32(random.normal(size=s) / 2) for name, s in shapes.items()}
    params = jax.device_put(params, {k: NamedSharding(mesh, spec) for k, spec in SPECS.items()})
    velocity = jax.tree.map(jnp.zeros_like, params)
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(SPECS, SPECS, P(), P(), P()),
        out_specs=(SPECS, SPECS, P()),
        check_vma=False,
    )(device_step)
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (3, 4)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for number in range(2):
            x = np.float32(random.normal(size=(BATCH, SIZE)))
            batch = jax.device_put((x, np.sin(x.sum(1))), NamedSharding(mesh, P()))
            key = jax.device_put(jax.random.key(number), NamedSharding(mesh, P()))
            params, velocity, _ = train_step(params, velocity, key, *batch)


if __name__ == "__main__":
    main()
