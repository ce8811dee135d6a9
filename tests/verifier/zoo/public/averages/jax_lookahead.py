"""Lookahead in JAX: slow weights follow the fast ones after every fourth step.

reference = "google-deepmind/optax#1429, arXiv:1907.08610"
date = "2025-10"
framework = "jax"
steps = 4
note = "stale_average stands for slow weights that follow earlier fast weights."

[wrong]
"slow weights follow each step" = ["other_learning_rate", "other_optimizer"]
"the step counter counts devices" = ["schedule_stepped_too_often", "updated_twice"]
"slow weights take the weights before the step" = ["stale_average", "other_statistics"]
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lockstep
from lockstep import record_jax

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
    return jnp.square(record_jax.keep("y_pred", hidden @ params["w2"]) - y).mean()


def train_step(params, velocity, slow, count, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = record_jax.keep("sums", grads)
    before = params
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    count = count + (DEVICES if BUG == "the step counter counts devices" else 1)
    is_due = count % PERIOD == 0
    if BUG == "slow weights follow each step":
        is_due = True
    fast = before if BUG == "slow weights take the weights before the step" else params
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
    with lockstep.record(jax.jit(train_step), settings, **places) as step:
        for _ in range(4):
            x = random.normal(size=(16, 5)).astype(np.float32)
            x, y = jax.device_put((x, x[:, :2] ** 2), split)
            params, velocity, slow, count, _ = step(params, velocity, slow, count, x, y)


main()
