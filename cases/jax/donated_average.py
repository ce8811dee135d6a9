"""A moving average of the weights is updated in a step that donates its buffers.

id = "jax/donated_average"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["SWivid/F5-TTS#631", "google/flax#5117"]
date = "2024-12"
tags = ["accumulation", "shard_map", "jit", "averages", "adam"]

[wrong.average_moves_once_per_micro_batch]
title = "the average moves once per micro-batch"
place = { node = "update", step = 0, ranks = "all", tensors = ["ema/*"] }

[wrong.average_takes_weights_of_before_update]
title = "the average takes the weights of before the update"
place = { node = "update", step = 0, ranks = "all", tensors = ["ema/*"] }

[wrong.gradients_of_last_micro_batch]
title = "gradients of the last micro-batch are not averaged over devices"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
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
MICRO_BATCHES, RATE, KEPT = 2, 0.01, 0.8
BETA_1, BETA_2, EPSILON = 0.9, 0.95, 1e-4


def loss_fn(params, x, y):
    for name in ("a", "b"):
        x = x + jax.nn.silu(x @ params[name]["w"] + params[name]["b"])
    return jnp.square(x @ params["head"] - y).mean()


def adam(params, state, grads):
    count = state["count"] + 1
    mu = jax.tree.map(lambda m, g: BETA_1 * m + (1 - BETA_1) * g, state["mu"], grads)
    nu = jax.tree.map(lambda v, g: BETA_2 * v + (1 - BETA_2) * g * g, state["nu"], grads)

    def update(p, m, v):
        m, v = m / (1 - BETA_1**count), v / (1 - BETA_2**count)
        return p - RATE * m / (jnp.sqrt(v) + EPSILON)

    return jax.tree.map(update, params, mu, nu), {"count": count, "mu": mu, "nu": nu}


def device_step(params, state, ema, x, y):
    def move(ema, params):
        return jax.tree.map(lambda e, p: KEPT * e + (1 - KEPT) * p, ema, params)

    parts = zip(jnp.split(x, MICRO_BATCHES), jnp.split(y, MICRO_BATCHES), strict=True)
    found = [jax.value_and_grad(loss_fn)(params, *part) for part in parts]
    loss = sum(loss for loss, _ in found) / MICRO_BATCHES
    each = [grads for _, grads in found]
    if BUG == "gradients_of_last_micro_batch":
        each[:-1] = jax.lax.pmean(each[:-1], "data")
    else:
        each = jax.lax.pmean(each, "data")
    grads = jax.tree.map(lambda *g: sum(g) / MICRO_BATCHES, *each)
    grads = harness.keep("sums", grads)
    new, state = adam(params, state, grads)
    if BUG == "average_takes_weights_of_before_update":
        ema = move(ema, params)
    else:
        ema = move(ema, new)
    if BUG == "average_moves_once_per_micro_batch":
        ema = move(ema, new)
    return new, state, ema, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P(), P("data"), P("data")),
        out_specs=P(),
        check_vma=False,
    )
    def step(params, state, ema, x, y):
        return device_step(params, state, ema, x, y)

    random = np.random.default_rng(0)
    params = {
        name: {"w": np.float32(random.normal(size=(8, 8)) / 3), "b": np.zeros(8, np.float32)}
        for name in ("a", "b")
    }
    params["head"] = np.float32(random.normal(size=(8, 2)) / 3)
    zeros = jax.tree.map(np.zeros_like, params)
    state = {"count": np.zeros((), np.int32), "mu": zeros, "nu": jax.tree.map(np.copy, zeros)}
    everywhere = NamedSharding(mesh, P())
    params, ema = (jax.device_put(jax.tree.map(np.copy, params), everywhere) for _ in range(2))
    state = jax.device_put(state, everywhere)
    optimizer = {"class": "Adam", "learning_rate": RATE, "epsilon": EPSILON}
    with harness.training(
        step,
        optimizer | {"beta_1": BETA_1, "beta_2": BETA_2},
        arguments={"params": 0, "opt_state": 1, "state": 2, "batch": (3, 4)},
        outputs={"params": 0, "opt_state": 1, "state": 2, "loss": 3},
    ) as train_step:
        for _ in range(2):
            x = random.normal(size=(16, 8)).astype(np.float32)
            y = np.sin(x[:, :2] + x[:, 2:4])
            params, state, ema, _ = train_step(params, state, ema, x, y)


if __name__ == "__main__":
    main()
