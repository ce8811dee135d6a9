"""Units are dropped by a key, of which each step must use another part.

id = "jax/key_of_each_step"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["p-doom/jasmine#239"]
date = "2025-10"
tags = ["jit", "sgd"]

[wrong.key_stays_as_it_is]
title = "the key stays as it is"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }
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
SIZE, WIDTH, BATCH, RATE, MOMENTUM, KEPT = 6, 20, 16, 0.2, 0.9, 0.7


def dropped(key, x):
    mask = jax.random.bernoulli(key, KEPT, x.shape)
    return jnp.where(mask, x / KEPT, 0)


def loss_fn(params, key, x, y):
    hidden = dropped(key, jax.nn.gelu(x @ params["in"] + params["bias"]))
    logits = harness.keep("y_pred", hidden @ params["out"])
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], axis=1).mean()


@jax.jit
def step(params, velocity, key, x, y):
    new_key, used = jax.random.split(key)
    if BUG == "key_stays_as_it_is":
        new_key, used = key, key
    loss, grads = jax.value_and_grad(loss_fn)(params, used, x, y)
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, new_key, loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    random = np.random.default_rng(33)
    shapes = {"in": (SIZE, WIDTH), "bias": (WIDTH,), "out": (WIDTH, 3)}
    params = {name: np.float32(random.normal(size=shape) / 2) for name, shape in shapes.items()}
    velocity = jax.tree.map(np.zeros_like, params)
    state = params, velocity, jax.random.key(7)
    params, velocity, key = jax.device_put(state, NamedSharding(mesh, P()))
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (3, 4)},
        outputs={"params": 0, "opt_state": 1, "loss": 3},
    ) as train_step:
        for _ in range(2):
            x = np.float32(random.normal(size=(BATCH, SIZE)))
            batch = jax.device_put((x, x[:, :3].argmax(1)), NamedSharding(mesh, P("data")))
            params, velocity, key, _ = train_step(params, velocity, key, *batch)


if __name__ == "__main__":
    main()
