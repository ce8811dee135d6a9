"""A bias before a normalisation, whose gradient is rounding alone; the step keeps no gradients.

id = "jax/bias_before_norm"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google/flax#examples/imagenet"]
date = "2026-04"
tags = ["jit", "batchnorm", "sgd", "sharding"]

[wrong.mean_is_taken_for_sum]
title = "the mean is taken for the mean of one device, and multiplied by their number"
place = { node = "sum", step = 0, ranks = "all", tensors = ["w", "v"] }
"""

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
RATE, MOMENTUM = 0.1, 0.9


def loss_fn(params, x, y):
    h = x @ params["w"] + params["b"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return jnp.square(jnp.tanh(h) @ params["v"] - y).mean()


@jax.jit
def train_step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    if BUG == "mean_is_taken_for_sum":
        grads = jax.tree.map(lambda g: DEVICES * g, grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    rows, whole = NamedSharding(mesh, P("data")), NamedSharding(mesh, P())
    random = np.random.default_rng(0)
    shapes = {"w": (6, 8), "b": (8,), "v": (8, 3)}
    params = {k: random.standard_normal(s).astype(np.float32) for k, s in shapes.items()}
    params, velocity = jax.device_put((params, jax.tree.map(np.zeros_like, params)), whole)
    with harness.training(
        train_step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as step:
        for _ in range(2):
            x, y = (random.standard_normal((16, n)).astype(np.float32) for n in (6, 3))
            params, velocity, _ = step(params, velocity, *jax.device_put((x, y), rows))


if __name__ == "__main__":
    main()
