"""A schedule within an accumulating optimizer counts the batches it sees, not the updates.

reference = "AI-Hypercomputer/maxtext#3428, huggingface/transformers#12675"
date = "2026-03"
framework = "jax"

[wrong]
"the schedule counts micro-steps" = ["schedule_stepped_too_often", "other_learning_rate"]
"gradients of micro-steps are added" = ["micro_batches_not_averaged", "scaled_gradient"]
"the update takes place one micro-step early" = ["lost_micro_batch"]
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
MICRO_STEPS, BATCH_SIZE, MOMENTUM = 4, 32, 0.9


def schedule(count):
    return 0.1 * (1.0 + count)  # Warms up.


def loss_fn(params, x, y):
    x = jax.nn.relu(x @ params["up"] + params["bias"])
    return jnp.square(x @ params["down"] - y).mean()


@jax.jit
def step(params, state, batch):
    parts = jax.tree.map(lambda a: a.reshape(-1, MICRO_STEPS, a.shape[-1]).swapaxes(0, 1), batch)

    def micro_step(carry, part):
        number, loss, total = carry
        own, grads = jax.value_and_grad(loss_fn)(params, *part)
        if BUG == "the update takes place one micro-step early":
            grads = jax.tree.map(lambda g: g * (number < MICRO_STEPS - 1), grads)
        return (number + 1, loss + own, jax.tree.map(jnp.add, total, grads)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    (_, loss, grads), _ = jax.lax.scan(micro_step, (0, jnp.zeros(()), zeros), parts)
    seen = MICRO_STEPS - (BUG == "the update takes place one micro-step early")
    if BUG != "gradients of micro-steps are added":
        grads = jax.tree.map(lambda g: g / seen, grads)
    grads = record_jax.keep("sums", grads)
    counted = MICRO_STEPS if BUG == "the schedule counts micro-steps" else 1
    rate = schedule(state["count"])
    momentum = jax.tree.map(lambda m, g: MOMENTUM * m + g, state["momentum"], grads)
    params = jax.tree.map(lambda p, m: p - rate * m, params, momentum)
    state = {"count": state["count"] + counted, "momentum": momentum}
    return params, state, loss / MICRO_STEPS


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    random = np.random.default_rng(0)
    params = {
        "up": np.float32(random.normal(size=(5, 24)) / 2),
        "bias": np.zeros(24, np.float32),
        "down": np.float32(random.normal(size=(24, 2)) / 5),
    }
    params = jax.device_put(params, NamedSharding(mesh, P()))
    state = {"count": jnp.zeros((), jnp.int32), "momentum": jax.tree.map(jnp.zeros_like, params)}
    state = jax.device_put(state, NamedSharding(mesh, P()))
    with lockstep.record(
        step,
        {"class": "SGD", "learning_rate": schedule, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": 2},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            x = random.normal(size=(BATCH_SIZE, 5)).astype(np.float32)
            batch = jax.device_put((x, np.cos(x[:, 1:3])), NamedSharding(mesh, P("data")))
            params, state, _ = train_step(params, state, batch)


if __name__ == "__main__":
    main()
