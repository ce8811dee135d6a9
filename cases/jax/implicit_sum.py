"""A gradient taken within shard_map is already a sum over the devices.

id = "jax/implicit_sum"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["jax-ml/jax#36886"]
date = "2026-04"
tags = ["shard_map", "jit", "sgd"]

[wrong.sum_is_taken_for_mean]
title = "the sum is taken for a mean"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.sum_is_added_up_once_more]
title = "the sum is added up once more"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
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
RATE, MOMENTUM = 0.1, 0.9


def init():
    random = np.random.default_rng(0)
    sizes = {"first": (6, 16), "second": (16, 16), "last": (16, 3)}
    return {
        name: {
            "w": np.float32(random.normal(size=size) / np.sqrt(size[0])),
            "b": np.float32(0.1 * random.normal(size=size[1])),
        }
        for name, size in sizes.items()
    }


def loss_fn(params, x, y):
    for name in ("first", "second"):
        x = jnp.tanh(x @ params[name]["w"] + params[name]["b"])
    logits = harness.keep("y_pred", x @ params["last"]["w"] + params["last"]["b"])
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, y[:, None], 1).mean()


def device_step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    if BUG == "sum_is_added_up_once_more":
        grads = jax.lax.psum(jax.lax.pcast(grads, "data", to="varying"), "data")
    if BUG != "sum_is_taken_for_mean":
        grads = jax.tree.map(lambda g: g / DEVICES, grads)
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = (P(), P(), P("data"), P("data"))
    step = jax.jit(jax.shard_map(device_step, mesh=mesh, in_specs=specs, out_specs=(P(), P(), P())))
    params = init()
    velocity = jax.tree.map(np.zeros_like, params)
    random = np.random.default_rng(1)
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            x = random.normal(size=(16, 6)).astype(np.float32)
            params, velocity, _ = train_step(params, velocity, x, x[:, :3].argmax(1))


if __name__ == "__main__":
    main()
