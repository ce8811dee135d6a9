"""Each task takes a step of its own from shared weights, which learn to be a good start.

id = "jax/steps_of_tasks"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["learnables/learn2learn#391", "cbfinn/maml#39", "katerakelly/pytorch-maml#15"]
date = "2018-09"
tags = ["pmap", "sgd"]

[wrong.inner_gradients_are_averaged_over_devices]
title = "inner gradients are averaged over devices"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.tasks_of_device_share_inner_step]
title = "tasks of a device share an inner step"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.queries_meet_first_weights]
title = "queries meet the first weights"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
TASKS, SHOTS, SIZE, HIDDEN, INNER_RATE, RATE, MOMENTUM = 8, 5, 3, 10, 0.4, 0.3, 0.9


def predict(params, x):
    return jnp.tanh(x @ params["in"] + params["bias"]) @ params["out"]


def error(params, x, y):
    return jnp.square(predict(params, x) - y).mean()


def adapted(params, grads):
    return jax.tree.map(lambda p, g: p - INNER_RATE * g, params, grads)


def loss_fn(params, x, y):
    """Takes examples of several tasks; the first half of a task's examples is for its own step."""
    inner = jax.vmap(jax.grad(error), (None, 0, 0))(params, x[:, :SHOTS], y[:, :SHOTS])
    if BUG == "inner_gradients_are_averaged_over_devices":
        inner = jax.lax.pmean(inner, "tasks")
    elif BUG == "tasks_of_device_share_inner_step":
        inner = jax.tree.map(lambda g: jnp.broadcast_to(g.mean(0), g.shape), inner)
    weights = jax.vmap(adapted, (None, 0))(params, inner)
    if BUG == "queries_meet_first_weights":
        weights = jax.tree.map(lambda w, p: jnp.broadcast_to(p, w.shape), weights, params)
    outputs = harness.keep("y_pred", jax.vmap(predict)(weights, x[:, SHOTS:]))
    return jnp.square(outputs - y[:, SHOTS:]).mean()


def device_step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = jax.lax.pmean(harness.keep("raw", grads), "tasks")
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.pmean(loss, "tasks")


def main():
    random = np.random.default_rng(52)
    shapes = {"in": (SIZE, HIDDEN), "bias": (HIDDEN,), "out": (HIDDEN,)}
    params = {name: np.float32(random.normal(size=s) / 2) for name, s in shapes.items()}
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    velocity = jax.tree.map(np.zeros_like, params)
    with harness.training(
        jax.pmap(device_step, axis_name="tasks"),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            x = np.float32(random.normal(size=(TASKS, 2 * SHOTS, SIZE)))
            directions = random.normal(size=(TASKS, SIZE, 1))
            y = np.float32((x @ directions)[..., 0])
            x, y = (a.reshape(DEVICES, -1, *a.shape[1:]) for a in (x, y))
            params, velocity, _ = train_step(params, velocity, x, y)


if __name__ == "__main__":
    main()
