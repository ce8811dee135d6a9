"""A checkpoint has the number of its last iteration, and a resumed run must begin with the next.

id = "resume/iteration_again"
framework = "jax"
processes = 2
steps = 4
mode = "resume"
references = ["AI-Hypercomputer/maxdiffusion#484"]
date = "2026-09"
tags = ["jit", "adam"]

[wrong.last_iteration_is_done_again]
title = "the last iteration is done again"
place = { node = "examples", step = 2, ranks = "all", tensors = "all" }

[wrong.count_of_steps_is_number_of_checkpoint]
title = "the count of steps is the number of the checkpoint"
place = { node = "start", step = 2, ranks = "all", tensors = ["step"] }

[wrong.moments_are_those_of_new_optimizer]
title = "moments are those of a new optimizer"
place = { node = "start", step = 2, ranks = "all", tensors = "all" }
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
STEPS, HALF, BATCH, SIZE, WIDTH = 4, 2, 16, 6, 14
RATE, WARM_UP, BETA_1, BETA_2, EPSILON = 0.04, 4, 0.9, 0.95, 1e-3


def init_state():
    random = np.random.default_rng(12)
    shapes = {"in": (SIZE, WIDTH), "time": (1, WIDTH), "out": (WIDTH, SIZE)}
    params = {k: np.float32(random.normal(size=s) / np.sqrt(s[0])) for k, s in shapes.items()}
    moments = {name: jax.tree.map(np.zeros_like, params) for name in ("mu", "nu")}
    return {"params": params, "opt": {"count": np.int32(0), **moments}, "step": np.int32(0)}


def loss_fn(params, x, times, target):
    hidden = jax.nn.silu(x @ params["in"] + times[:, None] @ params["time"])
    return jnp.square(harness.keep("y_pred", hidden @ params["out"]) - target).mean()


def train_step(params, opt, step, x, times, target):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, times, target)
    grads = harness.keep("sums", grads)
    rate, count = RATE * jnp.minimum(1, (step + 1) / WARM_UP), opt["count"] + 1
    first = jax.tree.map(lambda m, g: BETA_1 * m + (1 - BETA_1) * g, opt["mu"], grads)
    second = jax.tree.map(lambda v, g: BETA_2 * v + (1 - BETA_2) * g * g, opt["nu"], grads)

    def update(p, m, v):
        m, v = m / (1 - BETA_1**count), v / (1 - BETA_2**count)
        return p - rate * m / (jnp.sqrt(v) + EPSILON)

    params = jax.tree.map(update, params, first, second)
    return params, {"count": count, "mu": first, "nu": second}, step + 1, loss


def save(state, number):
    leaves, _ = jax.tree_util.tree_flatten_with_path(state)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}
    np.savez(SAVE + ".npz", number=number, **arrays)


def load():
    """Returns the saved state and the next iteration."""
    new = init_state()
    leaves, tree = jax.tree_util.tree_flatten_with_path(new)
    with np.load(LOAD + ".npz") as file:
        state = jax.tree.unflatten(tree, [file[jax.tree_util.keystr(path)] for path, _ in leaves])
        number = int(file["number"])
    if BUG == "count_of_steps_is_number_of_checkpoint":
        state["step"] = np.int32(number)
    elif BUG == "moments_are_those_of_new_optimizer":
        state["opt"] = new["opt"]
    return state, number if BUG == "last_iteration_is_done_again" else number + 1


def batch(number):
    random = np.random.default_rng(number)
    clean, noise = np.float32(random.normal(size=(2, BATCH, SIZE)))
    times = np.float32(random.uniform(size=BATCH))
    clean = np.cumsum(clean, 1)
    return clean + times[:, None] * (noise - clean), times, noise - clean


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    state, start = load() if LOAD else (init_state(), 0)
    state = jax.device_put(state, NamedSharding(mesh, P()))
    params, opt, step = state["params"], state["opt"], state["step"]
    places = {
        "arguments": {"params": 0, "opt_state": (1, 2), "batch": (3, 4, 5)},
        "outputs": {"params": 0, "opt_state": (1, 2), "loss": 3},
    }
    settings = {"class": "Adam", "beta_1": BETA_1, "beta_2": BETA_2, "epsilon": EPSILON}
    settings["learning_rate"] = lambda step: RATE * min(1, (step + 1) / WARM_UP)
    with harness.training(jax.jit(train_step), settings, **places) as step_fn:
        for number in range(start, HALF if SAVE else STEPS):
            own = jax.device_put(batch(number), NamedSharding(mesh, P("data")))
            params, opt, step, _ = step_fn(params, opt, step, *own)
    if SAVE:
        save({"params": params, "opt": opt, "step": step}, number)


if __name__ == "__main__":
    main()
