"""A mask says which leaves an optimizer changes; the gradients of all others pass through it.

id = "jax/masked_leaves"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google-deepmind/optax#159", "google-deepmind/optax#290"]
date = "2021-07"
tags = ["jit", "adam"]

[wrong.gradients_of_masked_leaves_are_not_set]
title = "gradients of masked leaves are not set to zero"
place = { node = "update", step = 0, ranks = "all", tensors = ["body/in", "body/out"] }

[wrong.mask_names_frozen_leaves]
title = "the mask names the frozen leaves"
place = { node = "start", step = 0, ranks = "all", tensors = "all" }

[wrong.masked_leaves_decay]
title = "masked leaves decay"
place = { node = "update", step = 0, ranks = "all", tensors = ["body/in", "body/out"] }
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
RATE, DECAY, BETA_1, BETA_2, EPSILON = 0.02, 0.5, 0.9, 0.98, 1e-3


def init():
    random = np.random.default_rng(4)
    shapes = {"body/in": (8, 20), "body/out": (20, 12), "head/kernel": (12, 5), "head/bias": (5,)}
    return {k: np.float32(random.normal(size=s) / np.sqrt(s[0])) for k, s in shapes.items()}


def loss_fn(params, x, y):
    x = jax.nn.silu(x @ params["body/in"]) @ params["body/out"]
    logits = jax.nn.silu(x) @ params["head/kernel"] + params["head/bias"]
    logits = harness.keep("y_pred", logits)
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def masked(mask, update):
    """Calls `update` for the leaves in the mask, and returns all others as they are."""
    return lambda updates, *others: {
        name: update(name, leaf, *others) if name in mask else leaf
        for name, leaf in updates.items()
    }


def make_optimizer(params):
    head = {name for name in params if name.startswith("head")}
    body = {*params} - head
    trained = body if BUG == "mask_names_frozen_leaves" else head

    def adam(name, gradient, state):
        first, second = state["mu"][name], state["nu"][name]
        first = BETA_1 * first + (1 - BETA_1) * gradient
        second = BETA_2 * second + (1 - BETA_2) * gradient**2
        state["mu"][name], state["nu"][name] = first, second
        first = first / (1 - BETA_1 ** state["count"])
        second = second / (1 - BETA_2 ** state["count"])
        return -RATE * first / (jnp.sqrt(second) + EPSILON)

    def decay(name, update, params):
        return update - RATE * DECAY * params[name]

    def update(grads, state, params):
        moments = {key: dict(state[key]) for key in ("mu", "nu")}
        state = moments | {"count": state["count"] + 1}
        updates = masked(trained, adam)(grads, state)
        if BUG != "gradients_of_masked_leaves_are_not_set":
            updates = masked({*params} - trained, lambda _, leaf: 0 * leaf)(updates)
        decayed = {*params} if BUG == "masked_leaves_decay" else trained
        updates = masked(decayed, decay)(updates, params)
        return jax.tree.map(jnp.add, params, updates), state

    zeros = {name: np.zeros_like(params[name]) for name in trained}
    return {"count": np.float32(0), "mu": zeros, "nu": dict(zeros)}, update


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    params = init()
    state, update = make_optimizer(params)

    @jax.jit
    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        params, state = update(harness.keep("sums", grads), state, params)
        return params, state, loss

    params, state = jax.device_put((params, state), NamedSharding(mesh, P()))
    optimizer = {"class": "AdamW", "learning_rate": RATE, "weight_decay": DECAY}
    optimizer |= {"beta_1": BETA_1, "beta_2": BETA_2, "epsilon": EPSILON}
    random = np.random.default_rng(9)
    with harness.training(
        step,
        optimizer,
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            x = np.float32(random.normal(size=(16, 8)))
            batch = jax.device_put((x, x[:, :5].argmax(1)), NamedSharding(mesh, P("data")))
            params, state, _ = train_step(params, state, *batch)


if __name__ == "__main__":
    main()
