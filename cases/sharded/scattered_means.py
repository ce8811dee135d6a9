"""Gradients are reduced and scattered, each device updates its rows, and rows are gathered again.

id = "sharded/scattered_means"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["KellerJordan/modded-nanogpt#102", "deepspeedai/DeepSpeed#971"]
date = "2021-04"
tags = ["shard_map", "jit", "gathered", "adam"]

[wrong.what_is_scattered_is_sum]
title = "what is scattered is a sum"
place = { node = "sum", step = 0, ranks = "all", tensors = ["embed", "mix", "head"] }

[wrong.rows_are_those_of_own_gradient]
title = "rows are those of the own gradient"
place = { node = "sum", step = 0, ranks = "all", tensors = ["embed", "mix", "head"] }

[wrong.small_weights_are_reduced_nowhere]
title = "small weights are reduced nowhere"
place = { node = "sum", step = 0, ranks = "all", tensors = ["bias"] }
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
WORDS, WIDTH, LENGTH, BATCH, RATE, EPSILON = 12, 8, 5, 16, 0.03, 1e-4
SHARDED = {"embed": True, "mix": True, "bias": False, "head": True}
SPECS = {name: P("data") if is_sharded else P() for name, is_sharded in SHARDED.items()}


def init():
    random = np.random.default_rng(16)
    shapes = {"embed": (WORDS, WIDTH), "mix": (LENGTH - 1, WIDTH, WIDTH), "bias": (WIDTH,)}
    shapes["head"] = WIDTH, WORDS
    return {name: np.float32(random.normal(size=s) / s[0] ** 0.5) for name, s in shapes.items()}


def loss_fn(params, text):
    """Predicts the last word of each line."""
    x = params["embed"][text[:, :-1]]
    x = jax.nn.gelu(jnp.einsum("bld,lde->be", x, params["mix"]) + params["bias"])
    logs = jax.nn.log_softmax(harness.keep("y_pred", x @ params["head"], P("data")))
    return -jnp.take_along_axis(logs, text[:, -1:], 1).mean()


def reduce(name, gradient):
    """Returns the own rows of the mean, or all of a small weight."""
    if not SHARDED[name]:
        is_left = BUG == "small_weights_are_reduced_nowhere"
        return gradient if is_left else jax.lax.pmean(gradient, "data")
    if BUG == "rows_are_those_of_own_gradient":
        return own_rows(gradient)
    rows = jax.lax.psum_scatter(gradient, "data", tiled=True)
    return rows if BUG == "what_is_scattered_is_sum" else rows / DEVICES


def own_rows(array):
    number = len(array) // DEVICES
    return jax.lax.dynamic_slice_in_dim(array, number * jax.lax.axis_index("data"), number)


def device_step(params, moments, text):
    loss, grads = jax.value_and_grad(loss_fn)(params, text)
    grads = {name: reduce(name, gradient) for name, gradient in grads.items()}
    grads = harness.keep("sums", grads, SPECS)
    count = moments["count"] + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments["first"], grads)
    second = jax.tree.map(lambda m, g: 0.99 * m + 0.01 * g * g, moments["second"], grads)

    def update(name):
        weight = own_rows(params[name]) if SHARDED[name] else params[name]
        m, v = first[name] / (1 - 0.9**count), second[name] / (1 - 0.99**count)
        weight = weight - RATE * m / (jnp.sqrt(v) + EPSILON)
        return jax.lax.all_gather(weight, "data", tiled=True) if SHARDED[name] else weight

    params = {name: update(name) for name in params}
    moments = {"count": count, "first": first, "second": second}
    return params, moments, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    params = jax.device_put(init(), NamedSharding(mesh, P()))
    places = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    zeros = jax.device_put(jax.tree.map(jnp.zeros_like, params), places)
    moments = {"count": jnp.float32(0), "first": zeros, "second": zeros}
    layout = {"count": P(), "first": SPECS, "second": SPECS}
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), layout, P("data")),
        out_specs=(P(), layout, P()),
        check_vma=False,
    )(device_step)
    settings = {"class": "Adam", "learning_rate": RATE, "beta_2": 0.99, "epsilon": EPSILON}
    random = np.random.default_rng(17)
    with harness.training(
        jax.jit(step),
        settings,
        arguments={"params": 0, "opt_state": 1, "batch": 2},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            text = random.integers(WORDS, size=(BATCH, LENGTH)).astype(np.int32)
            text[:, -1] = (text[:, 0] + text[:, 1]) % WORDS
            text = jax.device_put(text, NamedSharding(mesh, P("data")))
            params, moments, _ = train_step(params, moments, text)


if __name__ == "__main__":
    main()
