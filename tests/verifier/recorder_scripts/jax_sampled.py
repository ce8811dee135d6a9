"""Trains a small model, recorded with samples: FILE [plain|shards|mesh|large] [BUG] [REPLAY].

The mesh splits the weights of both layers, the embedding and their state over "model".
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jax_cases import OUTPUTS, WITHOUT_KEY, adam, mesh_of, start_of_adam
from lockstep import record_jax

LATER = 11  # A row of the embedding of which the samples have no element.
SPECS = {"embedding": P("model"), "hidden": P(None, "model"), "last": P("model")}
ADAM = {"class": "Adam", "learning_rate": 0.01, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}


def init(size, seed):
    random, shapes = np.random.default_rng(seed), {"hidden": (32, 40), "last": (40, 6)}
    params = {name: random.normal(size=shape) / 6 for name, shape in shapes.items()}
    params["embedding"] = random.normal(size=(size, 8)) if size < 99 else np.zeros((size, 8))
    return jax.tree.map(np.float32, params)


def loss_of(params, x, y, bug):
    vectors = params["embedding"][x].reshape(len(x), -1)
    logits = record_jax.keep("y_pred", jnp.tanh(vectors @ params["hidden"]) @ params["last"])
    right = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
    return -jnp.mean(right) * (1.01 if bug == "loss" else 1.0)


def update(params, state, grads, bug):
    if bug == "row":
        grads["embedding"] = grads["embedding"].at[LATER].multiply(1.01)
    grads = record_jax.keep("sums", grads)
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in grads.values()))
    if bug != "unclipped":
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 0.1 / norm), grads)
    return adam(params, state, record_jax.keep("clipped", grads))


def step_of(bug, axis=None):
    """Returns the step of one device of an axis."""

    def step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_of)(params, x, y, bug)
        if axis:
            grads = record_jax.keep("raw", grads)
            loss = jax.lax.pmean(loss, axis)
            grads = grads if bug == "reduce" else jax.lax.pmean(grads, axis)
        return *update(params, state, grads, bug), loss

    return step


def main(path, kind="plain", bug="", replay=None):
    params = init(2_200_000 if kind == "large" else 60, seed=int(bug == "other_start"))
    state, mesh = start_of_adam(params), mesh_of(2, "data")
    batch = np.random.default_rng(5).integers(0, 40, (64, 4)), np.arange(64) % 5
    if kind == "shards":
        specs = {"in_specs": (P(), P(), P("data"), P("data")), "out_specs": (P(), P(), P())}
        step = jax.jit(jax.shard_map(step_of(bug, "data"), mesh=mesh, **specs, check_vma=False))
    elif kind == "mesh":
        mesh = Mesh(np.reshape(jax.devices()[:4], (2, 2)), ("data", "model"))
        split = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
        of_state = {"mu": split, "nu": split, "count": NamedSharding(mesh, P())}
        params, state = jax.device_put((params, state), (split, of_state))
        step = jax.jit(step_of(bug), out_shardings=(split, of_state, NamedSharding(mesh, P())))
    else:
        step = jax.jit(step_of(bug))
    if kind in ("shards", "mesh"):
        batch = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in batch]
    with record_jax.record(
        path, step, WITHOUT_KEY, OUTPUTS, ADAM, replay=replay,
        sample=None if kind == "large" else 16, start=bug == "start",
    ) as step:  # fmt: skip
        for _ in range(2):
            params, state, _ = step(params, state, *batch)


if __name__ == "__main__":
    main(*sys.argv[1:])
