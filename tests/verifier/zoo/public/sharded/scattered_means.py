"""Gradients are reduced and scattered, each device updates its rows, and rows are gathered again.

reference = "KellerJordan/modded-nanogpt#102, deepspeedai/DeepSpeed#971"
date = "2021-04"
framework = "jax"

[wrong]
"what is scattered is a sum" = ["sum_instead_of_mean"]
"rows are those of the own gradient" = ["not_all_reduced", "partly_all_reduced"]
"small weights are reduced nowhere" = ["partly_all_reduced", "diverged_replicas"]
"""

import functools
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
    logs = jax.nn.log_softmax(record_jax.keep("y_pred", x @ params["head"], P("data")))
    return -jnp.take_along_axis(logs, text[:, -1:], 1).mean()


def reduce(name, gradient):
    """Returns the own rows of the mean, or all of a small weight."""
    if not SHARDED[name]:
        is_left = BUG == "small weights are reduced nowhere"
        return gradient if is_left else jax.lax.pmean(gradient, "data")
    if BUG == "rows are those of the own gradient":
        return own_rows(gradient)
    rows = jax.lax.psum_scatter(gradient, "data", tiled=True)
    return rows if BUG == "what is scattered is a sum" else rows / DEVICES


def own_rows(array):
    number = len(array) // DEVICES
    return jax.lax.dynamic_slice_in_dim(array, number * jax.lax.axis_index("data"), number)


def device_step(params, moments, text):
    loss, grads = jax.value_and_grad(loss_fn)(params, text)
    grads = {name: reduce(name, gradient) for name, gradient in grads.items()}
    grads = record_jax.keep("sums", grads, SPECS)
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
    with lockstep.record(
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
