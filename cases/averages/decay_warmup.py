"""The decay of an average of weights grows from step to step up to a limit.

id = "averages/decay_warmup"
framework = "jax"
processes = 2
steps = 3
mode = "pair"
references = ["huggingface/diffusers#1868", "huggingface/diffusers#1864"]
date = "2022-12"
tags = ["jit", "sgd"]

[wrong.one_minus_decay_is_taken_as_decay]
title = "one minus the decay is taken as the decay"
place = { node = "update", step = 0, ranks = "all", tensors = ["mean.*"] }

[wrong.decay_of_step_is_limit_of_next]
title = "the decay of a step is the limit of the next"
place = { node = "update", step = 0, ranks = "all", tensors = ["limit"] }
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
WIDTH, BATCH, RATE, MOMENTUM, LIMIT = 12, 16, 0.05, 0.9, 0.9999


def init():
    random = np.random.default_rng(3)
    shapes = {"in": (6, WIDTH), "time": (1, WIDTH), "mid": (WIDTH, WIDTH), "out": (WIDTH, 6)}
    return {name: np.float32(random.normal(size=s) / np.sqrt(s[0])) for name, s in shapes.items()}


def loss_fn(params, noisy, time, noise):
    x = jax.nn.swish(noisy @ params["in"] + jnp.sin(time @ params["time"]))
    x = x + jax.nn.swish(x @ params["mid"])
    predicted = harness.keep("y_pred", x @ params["out"])
    return jnp.abs(predicted - noise).mean()


def follow(average, params):
    """Moves the average; the first decays are small, as there is little to average yet."""
    count = average["count"] + 1
    decay = jnp.minimum(average["limit"], (1.0 + count) / (10.0 + count))
    limit = average["limit"]
    if BUG == "decay_of_step_is_limit_of_next":
        limit = decay
    if BUG == "one_minus_decay_is_taken_as_decay":
        decay = 1 - decay
    mean = jax.tree.map(lambda m, p: decay * m + (1 - decay) * p, average["mean"], params)
    return {"count": count, "limit": limit, "mean": mean}


@jax.jit
def step(params, velocity, average, noisy, time, noise):
    loss, grads = jax.value_and_grad(loss_fn)(params, noisy, time, noise)
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, follow(average, params), loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = jax.device_put(init(), everywhere)
    velocity = jax.tree.map(jnp.zeros_like, params)
    average = {"count": np.float32(0), "limit": np.float32(LIMIT), "mean": init()}
    average = jax.device_put(average, everywhere)
    random = np.random.default_rng(0)
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "state": 2, "batch": (3, 4, 5)},
        outputs={"params": 0, "opt_state": 1, "state": 2, "loss": 3},
    ) as train_step:
        for _ in range(3):
            clean, noise = np.float32(random.normal(size=(2, BATCH, 6)))
            time = np.float32(random.uniform(size=(BATCH, 1)))
            batch = (np.sqrt(1 - time) * clean + np.sqrt(time) * noise, time, noise)
            batch = jax.device_put(batch, split)
            params, velocity, average, _ = train_step(params, velocity, average, *batch)


if __name__ == "__main__":
    main()
