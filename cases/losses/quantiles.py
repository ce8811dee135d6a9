"""The errors of all pairs of quantiles are summed over one axis and averaged over the other.

id = "losses/quantiles"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = [
    "archsyscall/DistRL-TensorFlow2#1",
    "Stable-Baselines-Team/stable-baselines3-contrib#13",
]
date = "2020-12"
tags = ["jit", "sgd"]

[wrong.both_axes_of_quantiles_are_averaged]
title = "both axes of quantiles are averaged"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.errors_are_averaged_over_targets]
title = "errors are averaged over targets before they are weighted"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
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
STATES, ACTIONS, QUANTILES, BATCH_SIZE, GAMMA, KAPPA = 5, 3, 8, 16, 0.9, 1.0
RATE, MOMENTUM = 0.2, 0.9
TAUS = (np.arange(QUANTILES, dtype=np.float32) + 0.5) / QUANTILES


def init(random):
    shapes = {"in": (STATES, 24), "bias": (24,), "out": (24, ACTIONS * QUANTILES)}
    return {k: np.float32(random.normal(size=s) / np.sqrt(s[0])) for k, s in shapes.items()}


def quantiles_of(params, x):
    hidden = jax.nn.elu(x @ params["in"] + params["bias"])
    return (hidden @ params["out"]).reshape(-1, ACTIONS, QUANTILES)


def huber(errors):
    size = jnp.abs(errors)
    return jnp.where(size <= KAPPA, errors**2 / 2, KAPPA * (size - KAPPA / 2)) / KAPPA


def loss_fn(params, target, batch):
    """Returns the mean over examples and target quantiles of the sum over own quantiles."""
    after = quantiles_of(target, batch["next"])
    best = after.mean(2).argmax(1)
    after = jnp.take_along_axis(after, best[:, None, None], 1)[:, 0]
    goals = jax.lax.stop_gradient(batch["reward"][:, None] + GAMMA * after)
    own = harness.keep("y_pred", quantiles_of(params, batch["state"]))
    own = jnp.take_along_axis(own, batch["action"][:, None, None], 1)[:, 0]
    errors = goals[:, None] - own[:, :, None]  # Examples, own quantiles, targets.
    if BUG == "errors_are_averaged_over_targets":
        losses = huber(errors).mean(2, keepdims=True)
        errors = errors.mean(2, keepdims=True)
    else:
        losses = huber(errors)
    losses *= jnp.abs(TAUS[:, None] - (errors < 0))
    losses = losses.mean(2)
    losses = losses.mean(1) if BUG == "both_axes_of_quantiles_are_averaged" else losses.sum(1)
    return losses.mean()


@jax.jit
def step(params, velocity, target, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, target, batch)
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - RATE * v, params, velocity), velocity, loss


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    random = np.random.default_rng(11)
    target, params = (jax.device_put(init(random), NamedSharding(mesh, P())) for _ in range(2))
    velocity = jax.tree.map(jnp.zeros_like, params)
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": 3},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            states = np.float32(random.normal(size=(2, BATCH_SIZE, STATES)))
            batch = {"state": states[0], "next": states[1], "reward": 3 * states[0, :, 0]}
            batch["action"] = random.integers(ACTIONS, size=BATCH_SIZE).astype(np.int32)
            batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
            params, velocity, _ = train_step(params, velocity, target, batch)


if __name__ == "__main__":
    main()
