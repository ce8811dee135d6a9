"""`jax.jit` with shardings: one program for all devices, micro-batches, Adam with a schedule."""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cases import harness

DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
BATCH_SIZE, MICRO_BATCHES = 16, 2
BETA_1, BETA_2, EPSILON, PEAK = 0.9, 0.99, 1e-5, 0.02


def schedule(count):
    return PEAK * (count + 1) / 4


def init_params():
    random = np.random.default_rng(0)
    sizes = {"first": (4, 8), "second": (8, 8), "third": (8, 2)}
    params = {
        name: {"w": random.normal(size=s) * 0.5, "b": np.zeros(s[1])} for name, s in sizes.items()
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


def init_state(params):
    zeros = jax.tree.map(jnp.zeros_like, params)
    return {"count": jnp.zeros((), jnp.int32), "mu": zeros, "nu": zeros}


def loss_fn(params, x, y):
    for name in ("first", "second"):
        x = jax.nn.gelu(x @ params[name]["w"] + params[name]["b"])
    return jnp.mean((x @ params["third"]["w"] + params["third"]["b"] - y) ** 2)


def adam(grads, state, params):
    count = state["count"] + 1
    mu = jax.tree.map(lambda m, g: BETA_1 * m + (1 - BETA_1) * g, state["mu"], grads)
    nu = jax.tree.map(lambda v, g: BETA_2 * v + (1 - BETA_2) * g * g, state["nu"], grads)
    rate = schedule(state["count"])

    def update(p, m, v):
        m, v = m / (1 - BETA_1**count), v / (1 - BETA_2**count)
        return p - rate * m / (jnp.sqrt(v) + EPSILON)

    return jax.tree.map(update, params, mu, nu), {"count": count, "mu": mu, "nu": nu}


def train_step(params, state, batch):
    batch = jax.tree.map(lambda a: a.reshape(-1, MICRO_BATCHES, *a.shape[1:]).swapaxes(0, 1), batch)

    def accumulate(carry, micro_batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, *micro_batch)
        return jax.tree.map(jnp.add, carry, (loss, grads)), None

    start = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    total, _ = jax.lax.scan(accumulate, start, batch)
    loss, grads = jax.tree.map(lambda x: x / MICRO_BATCHES, total)
    grads = harness.keep("sums", grads)
    params, state = adam(grads, state, params)
    return params, state, loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    replicated, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    params = jax.device_put(init_params(), replicated)
    state = jax.device_put(init_state(params), replicated)
    random = np.random.default_rng(3)
    with harness.training(
        jax.jit(train_step),
        {
            "class": "Adam",
            "learning_rate": schedule,
            "beta_1": BETA_1,
            "beta_2": BETA_2,
            "epsilon": EPSILON,
        },
        arguments={"params": 0, "opt_state": 1, "batch": 2},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train:
        for _ in range(3):
            x = random.normal(size=(BATCH_SIZE, 4)).astype(np.float32)
            batch = jax.device_put((x, x[:, :2] * x[:, 2:]), split)
            params, state, _ = train(params, state, batch)


if __name__ == "__main__":
    main()
