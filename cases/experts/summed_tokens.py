"""Devices with other experts must see the same tokens, as what they compute is added.

id = "experts/summed_tokens"
framework = "jax"
processes = 4
steps = 2
mode = "pair"
references = ["vllm-project/tpu-inference#2248"]
date = "2026-04"
tags = ["experts", "shard_map", "jit", "gathered", "sgd"]

[wrong.devices_with_other_experts_have_other_tokens]
title = "devices with other experts have other tokens"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.results_of_other_experts_are_not_added]
title = "results of other experts are not added"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
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
PARTS = 2 if DEVICES > 1 else 1  # Of the experts.
EXPERTS, WIDTH, BATCH, RATE, MOMENTUM = 4, 8, 24, 0.3, 0.9
SPECS = {"router": P(), "up": P("expert"), "down": P("expert"), "head": P()}
MESH = Mesh(np.array(jax.devices()).reshape(-1, PARTS), ("data", "expert"))


def init():
    random = np.random.default_rng(4)
    shapes = {"router": (WIDTH, EXPERTS), "head": (WIDTH, 2)}
    shapes |= {"up": (EXPERTS, WIDTH, 12), "down": (EXPERTS, 12, WIDTH)}
    return {k: np.float32(random.normal(size=s) / np.sqrt(s[-2])) for k, s in shapes.items()}


def experts(x, gates, up, down):
    """Computes the own experts for some tokens, and adds up what all have for them."""
    own = jax.lax.axis_index("expert")
    if BUG == "devices_with_other_experts_have_other_tokens":
        x, gates = (each.reshape(PARTS, -1, each.shape[-1])[own] for each in (x, gates))
    gates = gates.reshape(len(gates), PARTS, -1)[:, own]
    hidden = jax.nn.leaky_relu(jnp.einsum("td,edh->teh", x, up))
    y = jnp.einsum("teh,ehd,te->td", hidden, down, gates)
    if BUG != "results_of_other_experts_are_not_added":
        y = jax.lax.psum(y, "expert")
    if BUG == "devices_with_other_experts_have_other_tokens":
        y = jax.lax.all_gather(y, "expert", tiled=True)
    return y


def mixture(params, x):
    scores = jax.nn.softmax(x @ params["router"])
    second = jax.lax.top_k(scores, 2)[0][:, 1:]
    gates = jnp.where(scores >= second, scores, 0)
    places = P("data"), P("data"), P("expert"), P("expert")
    layer = jax.shard_map(experts, mesh=MESH, in_specs=places, out_specs=P("data"), check_vma=False)
    return x + layer(x, gates, params["up"], params["down"])


def loss_fn(params, x, y):
    outputs = harness.keep("y_pred", mixture(params, x) @ params["head"])
    errors = jnp.abs(outputs - y)
    return jnp.where(errors < 0.5, errors**2, errors - 0.25).mean()


@jax.jit
def step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, loss


def main():
    params = {
        name: jax.device_put(value, NamedSharding(MESH, SPECS[name]))
        for name, value in init().items()
    }
    velocity = jax.tree.map(jnp.zeros_like, params)
    random = np.random.default_rng(0)
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            x = np.float32(random.normal(size=(BATCH, WIDTH)))
            batch = jax.device_put((x, np.sin(3 * x[:, :2])), NamedSharding(MESH, P("data")))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
