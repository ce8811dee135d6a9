"""Experts choose their tokens, as many each, and from those of all devices.

id = "experts/chosen_tokens"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google-deepmind/simply#8", "deepseek-ai/DeepEP#595"]
date = "2026-02"
tags = ["shard_map", "jit", "experts", "sgd"]

[wrong.experts_choose_on_each_device]
title = "experts choose on each device"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.device_fills_places_of_all]
title = "a device fills the places of all devices"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.scores_of_chosen_have_no_gradient]
title = "scores of the chosen have no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["router"] }
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
TOKENS, SIZE, EXPERTS, PLACES, RATE, MOMENTUM = 24, 5, 4, 6, 0.3, 0.9


def last_chosen(scores):
    """Returns the lowest score with which an expert takes a token; scores are [tokens, experts]."""
    if BUG == "experts_choose_on_each_device":
        return jnp.sort(scores, 0)[-(PLACES // DEVICES)]
    if BUG != "device_fills_places_of_all":
        scores = jax.lax.all_gather(scores, "tokens", tiled=True)
    return jnp.sort(scores, 0)[-PLACES]


def loss_fn(params, x, y):
    scores = jax.nn.softmax(x @ params["router"], axis=-1)
    is_chosen = scores >= jax.lax.stop_gradient(last_chosen(scores))
    if BUG == "scores_of_chosen_have_no_gradient":
        scores = jax.lax.stop_gradient(scores)
    hidden = jax.nn.silu(jnp.einsum("ti,eih->teh", x, params["in"]))
    outputs = jnp.einsum("teh,eho,te->to", hidden, params["out"], scores * is_chosen)
    return jnp.square(x + outputs - y).sum() / (TOKENS * SIZE)


def device_step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = jax.lax.psum(harness.keep("raw", grads, P()), "tokens")
    grads = harness.keep("sums", grads, P())
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.psum(loss, "tokens")


def main():
    mesh = Mesh(np.array(jax.devices()), ("tokens",))
    random = np.random.default_rng(56)
    shapes = {"router": (SIZE, EXPERTS), "in": (EXPERTS, SIZE, 8), "out": (EXPERTS, 8, SIZE)}
    params = {name: np.float32(random.normal(size=s) / 2) for name, s in shapes.items()}
    params = jax.device_put(params, NamedSharding(mesh, P()))
    velocity = jax.tree.map(jnp.zeros_like, params)
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("tokens"), P("tokens")),
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
            x = random.normal(size=(TOKENS, SIZE)) + np.linspace(-1, 1, TOKENS)[:, None]
            batch = np.float32(x), np.float32(np.roll(x, 1, 1))
            batch = jax.device_put(batch, NamedSharding(mesh, P("tokens")))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
