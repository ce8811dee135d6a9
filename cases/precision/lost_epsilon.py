"""The epsilon of an optimizer is 0 in float16: a gradient of 0 is then divided by 0.

id = "precision/lost_epsilon"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google-deepmind/optax#1754", "google-deepmind/optax#1789"]
date = "2026-08"
tags = ["low_precision", "pmap"]

[wrong.denominators_are_computed_in_float16]
title = "denominators are computed in float16"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
WIDTH, HIDDEN, BATCH, RATE, BETA_1, BETA_2, EPSILON = 6, 10, 16, 0.02, 0.9, 0.6, 1e-8


def novograd(params, state, grads):
    """Divides the gradient of each weight by a moving norm of the whole."""

    def second(square, grad):
        new = jnp.square(grad).sum()
        return jnp.where(state["count"] == 0, new, BETA_2 * square + (1 - BETA_2) * new)

    def normalised(grad, square):
        if BUG == "denominators_are_computed_in_float16":
            root = jnp.sqrt(square).astype(jnp.float16) + jnp.float16(EPSILON)
        else:
            root = jnp.sqrt(square) + EPSILON
        return grad / root.astype(jnp.float32)

    squares = jax.tree.map(second, state["nu"], grads)
    updates = jax.tree.map(normalised, grads, squares)
    first = jax.tree.map(lambda m, u: BETA_1 * m + u, state["mu"], updates)
    params = jax.tree.map(lambda p, m: p - RATE * m, params, first)
    return params, {"count": state["count"] + 1, "mu": first, "nu": squares}


def loss_fn(params, x, tasks, y):
    """The outputs of two tasks have heads of their own."""
    hidden = jax.nn.swish(x @ params["in"] + params["bias"])
    outputs = jnp.where(tasks == 0, hidden @ params["head_0"], hidden @ params["head_1"])
    outputs = harness.keep("y_pred", outputs)
    return jnp.abs(jnp.arctan(outputs - y)).mean()


def device_step(params, state, x, tasks, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, tasks, y)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "batch"))
    return *novograd(params, state, grads), jax.lax.pmean(loss, "batch")


def main():
    random = np.random.default_rng(6)
    shapes = {"in": (WIDTH, HIDDEN), "bias": (HIDDEN,), "head_0": (HIDDEN,), "head_1": (HIDDEN,)}
    params = {k: np.float32(random.normal(size=s) / np.sqrt(s[0])) for k, s in shapes.items()}
    state = {
        "count": np.int32(0),
        "mu": jax.tree.map(np.zeros_like, params),
        "nu": {name: np.float32(0) for name in params},
    }
    params, state = jax.tree.map(lambda a: np.stack([a] * DEVICES), (params, state))
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "NovoGrad", "learning_rate": RATE},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3, 4)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for step in range(2):
            x = np.float32(random.normal(size=(DEVICES, BATCH // DEVICES, WIDTH)))
            # The first batch has examples of the first task only.
            tasks = np.int32(x[..., 0] > 0) * np.int32(step)
            params, state, _ = train_step(params, state, x, tasks, x[..., 1] * x[..., 2])


if __name__ == "__main__":
    main()
