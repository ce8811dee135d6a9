"""A schedule within an accumulating optimizer counts the batches it sees, not the updates.

id = "jax/micro_steps"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["AI-Hypercomputer/maxtext#3428", "huggingface/transformers#12675"]
date = "2026-03"
tags = ["jit", "sgd"]

[wrong.schedule_counts_micro_steps]
title = "the schedule counts micro-steps"
place = { node = "update", step = 0, ranks = "all", tensors = ["count"] }

[wrong.gradients_of_micro_steps_are_added]
title = "gradients of micro-steps are added"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.update_takes_place_one_micro_step_early]
title = "the update takes place one micro-step early"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }
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
        if BUG == "update_takes_place_one_micro_step_early":
            grads = jax.tree.map(lambda g: g * (number < MICRO_STEPS - 1), grads)
        return (number + 1, loss + own, jax.tree.map(jnp.add, total, grads)), None

    zeros = jax.tree.map(jnp.zeros_like, params)
    (_, loss, grads), _ = jax.lax.scan(micro_step, (0, jnp.zeros(()), zeros), parts)
    seen = MICRO_STEPS - (BUG == "update_takes_place_one_micro_step_early")
    if BUG != "gradients_of_micro_steps_are_added":
        grads = jax.tree.map(lambda g: g / seen, grads)
    grads = harness.keep("sums", grads)
    counted = MICRO_STEPS if BUG == "schedule_counts_micro_steps" else 1
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
    with harness.training(
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
