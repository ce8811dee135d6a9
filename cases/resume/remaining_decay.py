"""The rate decays to zero over all steps; a resumed run plans it over those that remain.

id = "resume/remaining_decay"
framework = "jax"
processes = 2
steps = 4
mode = "resume"
references = ["borisdayma/dalle-mini#138", "google-deepmind/optax#1036"]
date = "2022-02"
tags = ["pmap"]

[wrong.rate_decays_over_steps_that_remain]
title = "the rate decays over the steps that remain"
place = { node = "update", step = 2, ranks = "all", tensors = "all" }

[wrong.steps_of_saved_run_are_added_to_count]
title = "steps of the saved run are added to the count"
place = { node = "update", step = 2, ranks = "all", tensors = "all" }

[wrong.schedule_has_count_of_its_own]
title = "the schedule has a count of its own"
place = { node = "start", step = 2, ranks = "all", tensors = ["count"] }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
SAVE, LOAD = os.environ.get("SAVE"), os.environ.get("LOAD")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
STEPS, HALF, PLANNED, BATCH_SIZE, RATE, DECAY = 4, 2, 8, 16, 0.1, 0.8
FIRST = HALF if LOAD else 0


def rate_of(count):
    """Returns the learning rate of the step with this number."""
    planned = PLANNED
    if BUG == "rate_decays_over_steps_that_remain":
        planned = PLANNED - FIRST
    elif BUG == "steps_of_saved_run_are_added_to_count":
        count = count + FIRST
    return RATE * jnp.maximum(0.0, 1 - count / planned)


def loss_fn(params, x, y):
    scores = x @ params["linear"] + jnp.square(x @ params["factors"]) @ params["out"]
    scores = harness.keep("y_pred", scores + params["bias"])
    return (jnp.logaddexp(0, scores) - y * scores).mean()


def device_step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "batch"))
    squares = jax.tree.map(lambda s, g: DECAY * s + (1 - DECAY) * g**2, state["squares"], grads)
    rate = rate_of(state["count"])
    params = jax.tree.map(
        lambda p, s, g: p - rate * g / (jnp.sqrt(s) + 1e-2), params, squares, grads
    )
    return params, {"count": state["count"] + 1, "squares": squares}, jax.lax.pmean(loss, "batch")


def init_state():
    random = np.random.default_rng(27)
    shapes = {"linear": (8, 1), "factors": (8, 5), "out": (5, 1), "bias": (1,)}
    params = {k: np.float32(random.normal(size=s) / 3) for k, s in shapes.items()}
    squares = jax.tree.map(np.zeros_like, params)
    return {"params": params, "state": {"count": np.float32(0), "squares": squares}}


def load():
    """Returns what was saved, in the tree of a new state."""
    leaves, tree = jax.tree.flatten(init_state())
    with np.load(LOAD + ".npz") as file:
        saved = jax.tree.unflatten(tree, [file[str(i)] for i in range(len(leaves))])
    if BUG == "schedule_has_count_of_its_own":
        saved["state"]["count"] = np.float32(0)
    return saved


def main():
    start = load() if LOAD else init_state()
    start = jax.tree.map(lambda leaf: np.stack([leaf] * DEVICES), start)
    params, state = start["params"], start["state"]
    settings = {"class": "RMSprop", "learning_rate": rate_of, "rho": DECAY, "epsilon": 1e-2}
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        settings,
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for step in range(FIRST, HALF if SAVE else STEPS):
            x = np.random.default_rng(step).normal(size=(DEVICES, BATCH_SIZE // DEVICES, 8))
            x = np.float32(x)
            y = np.float32(x[..., :1] * x[..., 1:2] > 0)
            params, state, _ = train_step(params, state, x, y)
    if SAVE:
        leaves = jax.tree.leaves({"params": params, "state": state})
        np.savez(SAVE + ".npz", **{str(i): np.asarray(leaf[0]) for i, leaf in enumerate(leaves)})


if __name__ == "__main__":
    main()
