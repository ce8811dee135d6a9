"""Arrays of a JAX training are restored without moving statistics, or without second moments.

id = "resume/jax_restored_tree"
framework = "jax"
processes = 2
steps = 4
mode = "resume"
references = ["AI-Hypercomputer/maxtext#4343", "google-deepmind/ferminet#105"]
date = "2026-07"
tags = ["jit", "adam"]

[wrong.statistics_are_not_restored]
title = "statistics are not restored"
place = { node = "start", step = 2, ranks = "all", tensors = ["mean"] }

[wrong.second_moments_start_again]
title = "second moments start again"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }

[wrong.step_count_starts_again]
title = "the step count starts again"
place = { node = "start", step = 2, ranks = "all", tensors = ["step"] }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
STEPS, HALF, BATCH, RATE, BETA_1, BETA_2, EPSILON = 4, 2, 16, 0.02, 0.9, 0.99, 1e-3


def init_state():
    random = np.random.default_rng(0)
    shapes = {"w1": (6, 16), "b1": (16,), "w2": (16, 2)}
    params = {k: np.float32(random.normal(size=s) / 3) for k, s in shapes.items()}
    moments = [jax.tree.map(np.zeros_like, params) for _ in range(2)]
    opt_state = {"step": np.float32(0), "velocity": moments[0], "square": moments[1]}
    return params, opt_state, {"mean": np.zeros(6, np.float32)}


def loss_fn(params, stats, x, y):
    hidden = jax.nn.gelu((x - stats["mean"]) @ params["w1"] + params["b1"])
    return jnp.square(harness.keep("y_pred", hidden @ params["w2"]) - y).mean()


def train_step(params, opt_state, stats, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, stats, x, y)
    grads = harness.keep("sums", grads)
    step = opt_state["step"] + 1
    first = jax.tree.map(lambda m, g: BETA_1 * m + (1 - BETA_1) * g, opt_state["velocity"], grads)
    second = jax.tree.map(lambda v, g: BETA_2 * v + (1 - BETA_2) * g**2, opt_state["square"], grads)

    def update(p, m, v):
        m, v = m / (1 - BETA_1**step), v / (1 - BETA_2**step)
        return p - RATE * m / (jnp.sqrt(v) + EPSILON)

    params = jax.tree.map(update, params, first, second)
    stats = {"mean": 0.8 * stats["mean"] + 0.2 * x.mean(0)}
    return params, {"step": step, "velocity": first, "square": second}, stats, loss


def save(state, path):
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    np.savez(path + ".npz", **{jax.tree_util.keystr(k): np.asarray(v) for k, v in leaves})


def load(state, path):
    leaves, tree = jax.tree_util.tree_flatten_with_path(state)
    with np.load(path + ".npz") as file:
        saved = {jax.tree_util.keystr(k): file[jax.tree_util.keystr(k)] for k, _ in leaves}
    params, opt_state, stats = jax.tree.unflatten(tree, saved.values())
    if BUG == "second_moments_start_again":
        opt_state["square"] = state[1]["square"]
    elif BUG == "step_count_starts_again":
        opt_state["step"] = state[1]["step"]
    elif BUG == "statistics_are_not_restored":
        stats = state[2]
    return params, opt_state, stats


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    state = load(init_state(), LOAD) if LOAD else init_state()
    params, opt_state, stats = jax.device_put(state, whole)
    places = {
        "arguments": {"params": 0, "opt_state": (1, 2), "batch": (3, 4)},
        "outputs": {"params": 0, "opt_state": (1, 2), "loss": 3},
    }
    settings = {"class": "Adam", "learning_rate": RATE, "beta_1": BETA_1, "beta_2": BETA_2}
    settings["epsilon"] = EPSILON
    with harness.training(jax.jit(train_step), settings, **places) as step_fn:
        for step in range(HALF if LOAD else 0, HALF if SAVE else STEPS):
            x = np.float32(np.random.default_rng(step + 1).normal(1, 1, (BATCH, 6)))
            x, y = jax.device_put((x, x[:, :2] * x[:, 2:4]), split)
            params, opt_state, stats, _ = step_fn(params, opt_state, stats, x, y)
    if SAVE:
        save((params, opt_state, stats), SAVE)


main()
