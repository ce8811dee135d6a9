"""A step follows the natural gradient: that of the batch, times the inverse of its Fisher matrix.

id = "jax/natural_gradient"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["openai/baselines#300", "netket/netket#517"]
date = "2018-02"
tags = ["pmap", "sgd"]

[wrong.each_device_solves_for_its_own]
title = "each device solves for its own gradient and matrix"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.matrix_is_that_of_device]
title = "the matrix is that of a device"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.damping_is_added_on_each_device]
title = "damping is added on each device"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)

SIZE, ACTIONS, BATCH, RATE, DAMPING = 4, 3, 24, 0.3, 0.2


def log_chance(params, state, action):
    logits = state @ params["kernel"] + params["bias"]
    return jax.nn.log_softmax(logits)[action]


def loss_fn(params, states, actions, gains):
    logs = jax.vmap(log_chance, (None, 0, 0))(params, states, actions)
    return -(harness.keep("y_pred", logs) * gains).mean()


def fisher(params, states, actions):
    """Returns the mean outer product of the gradients of log chances."""
    grads = jax.vmap(jax.grad(log_chance), (None, 0, 0))(params, states, actions)
    rows = jax.vmap(lambda grad: ravel_pytree(grad)[0])(grads)
    return rows.T @ rows / len(rows)


def solve(matrix, grads):
    flat, back = ravel_pytree(grads)
    return back(jnp.linalg.solve(matrix, flat))


def device_step(params, states, actions, gains):
    loss, grads = jax.value_and_grad(loss_fn)(params, states, actions, gains)
    matrix = fisher(params, states, actions)
    damping = DAMPING * jnp.eye(len(matrix))
    if BUG == "each_device_solves_for_its_own":
        grads = solve(matrix + damping, grads)
        grads = harness.keep("sums", jax.lax.pmean(harness.keep("raw", grads), "batch"))
    else:
        grads = jax.lax.pmean(harness.keep("raw", grads), "batch")
        grads = harness.keep("sums", grads)
        if BUG == "damping_is_added_on_each_device":
            matrix = jax.lax.psum(matrix / DEVICES + damping, "batch")
        elif BUG == "matrix_is_that_of_device":
            matrix = matrix + damping
        else:
            matrix = jax.lax.pmean(matrix, "batch") + damping
        grads = solve(matrix, grads)
    params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return params, jax.lax.pmean(loss, "batch")


def main():
    random = np.random.default_rng(51)
    params = {
        "kernel": np.float32(random.normal(size=(SIZE, ACTIONS)) / 2),
        "bias": np.zeros(ACTIONS, np.float32),
    }
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "SGD", "learning_rate": RATE},
        arguments={"params": 0, "batch": (1, 2, 3)},
        outputs={"params": 0, "loss": 1},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            states = np.float32(random.normal(size=(DEVICES, BATCH // DEVICES, SIZE)))
            actions = np.int32(states[..., :ACTIONS].argmax(-1))
            gains = np.float32(np.cos(states.sum(-1)))
            params, _ = train_step(params, states, actions, gains)


if __name__ == "__main__":
    main()
