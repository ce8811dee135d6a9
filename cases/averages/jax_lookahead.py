"""Lookahead in JAX: slow weights follow the fast ones after every fourth step.

id = "averages/jax_lookahead"
framework = "jax"
processes = 2
steps = 4
mode = "pair"
references = ["google-deepmind/optax#1429", "arXiv:1907.08610"]
date = "2025-10"
tags = ["jit", "sgd"]

[wrong.slow_weights_follow_each_step]
title = "slow weights follow each step"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.step_counter_counts_devices]
title = "the step counter counts devices"
place = { node = "update", step = 0, ranks = "all", tensors = ["count"] }

[wrong.slow_weights_take_weights_before_step]
title = "slow weights take the weights before the step"
place = { node = "update", step = 3, ranks = "all", tensors = "all" }
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
RATE, MOMENTUM, PERIOD, ALPHA = 0.2, 0.9, 4, 0.5


def init_params():
    random = np.random.default_rng(0)
    shapes = {"w1": (5, 16), "b1": (16,), "w2": (16, 2)}
    return {k: np.float32(random.normal(size=s) / 4) for k, s in shapes.items()}


def loss_fn(params, x, y):
    hidden = jnp.tanh(x @ params["w1"] + params["b1"])
    return jnp.square(harness.keep("y_pred", hidden @ params["w2"]) - y).mean()


def train_step(params, velocity, slow, count, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = harness.keep("sums", grads)
    before = params
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    count = count + (DEVICES if BUG == "step_counter_counts_devices" else 1)
    is_due = count % PERIOD == 0
    if BUG == "slow_weights_follow_each_step":
        is_due = True
    fast = before if BUG == "slow_weights_take_weights_before_step" else params
    slow = jax.tree.map(lambda s, f: jnp.where(is_due, s + ALPHA * (f - s), s), slow, fast)
    params = jax.tree.map(lambda s, f: jnp.where(is_due, s, f), slow, params)
    return params, velocity, slow, count, loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = jax.device_put(init_params(), whole)
    velocity, slow = jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.copy, params)
    count, random = jax.device_put(jnp.zeros((), jnp.int32), whole), np.random.default_rng(1)
    places = {
        "arguments": {"params": 0, "opt_state": (1, 2, 3), "batch": (4, 5)},
        "outputs": {"params": 0, "opt_state": (1, 2, 3), "loss": 4},
    }
    settings = {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM}
    with harness.training(jax.jit(train_step), settings, **places) as step:
        for _ in range(4):
            x = random.normal(size=(16, 5)).astype(np.float32)
            x, y = jax.device_put((x, x[:, :2] ** 2), split)
            params, velocity, slow, count, _ = step(params, velocity, slow, count, x, y)


main()
