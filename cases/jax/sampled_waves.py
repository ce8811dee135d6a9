"""A transform has its own gradient rule, which must add up the gradient of what devices share.

id = "jax/sampled_waves"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["flatironinstitute/jax-finufft#226", "flatironinstitute/jax-finufft#232"]
date = "2026-06"
tags = ["shard_map", "jit", "sgd"]

[wrong.rule_does_not_sum_gradient_of_grid]
title = "the rule does not sum the gradient of the grid"
place = { node = "sum", step = 0, ranks = "all", tensors = ["grid"] }

[wrong.gradient_of_grid_is_summed_again]
title = "the gradient of the grid is summed again"
place = { node = "sum", step = 0, ranks = "all", tensors = ["grid"] }
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
WAVES, POINTS, RATE, MOMENTUM = 9, 40, 2.0, 0.8


def waves(points):
    angles = points[:, None] * jnp.arange(1, WAVES + 1)
    return jnp.cos(angles), jnp.sin(angles)


@jax.custom_vjp
def transform(grid, points):
    """Returns at each point the sum of all waves, whose weights are the grid."""
    cosines, sines = waves(points)
    return cosines @ grid[0] + sines @ grid[1]


def transform_forward(grid, points):
    return transform(grid, points), (grid, points)


def transform_backward(kept, gradient):
    grid, points = kept
    cosines, sines = waves(points)
    grid_gradient = jnp.stack([gradient @ cosines, gradient @ sines])
    if BUG != "rule_does_not_sum_gradient_of_grid":
        grid_gradient = jax.lax.psum(grid_gradient, "points")
    slopes = cosines @ (grid[1] * jnp.arange(1, WAVES + 1))
    slopes -= sines @ (grid[0] * jnp.arange(1, WAVES + 1))
    return grid_gradient, gradient * slopes


transform.defvjp(transform_forward, transform_backward)


def loss_fn(params, points, targets):
    """A loss that large errors hardly change."""
    scale, shift = params["scale"], params["shift"]
    outputs = harness.keep("y_pred", scale * transform(params["grid"], points + shift))
    return jnp.log1p(jnp.square(outputs - targets)).sum() / POINTS


def device_step(params, velocity, points, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, points, targets)
    summed = jax.lax.psum(grads, "points")
    if BUG != "gradient_of_grid_is_summed_again":
        summed["grid"] = grads["grid"]
    grads = harness.keep("sums", summed)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.psum(loss, "points")


def main():
    mesh = Mesh(np.array(jax.devices()), ("points",))
    random = np.random.default_rng(14)
    params = {
        "grid": np.float32(random.normal(size=(2, WAVES)) / 3),
        "scale": np.float32(0.8),
        "shift": np.float32(0.1),
    }
    params = jax.device_put(params, NamedSharding(mesh, P()))
    velocity = jax.tree.map(jnp.zeros_like, params)
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("points"), P("points")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )(device_step)
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            points = np.float32(random.uniform(-3, 3, size=POINTS))
            batch = jax.device_put((points, np.sign(points)), NamedSharding(mesh, P("points")))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
