"""Trains in JAX with Adam and dropout, saves a checkpoint and resumes from it.

jax_resumed.py STEPS [save=FILE] [load=FILE] [without=PART]: PART is "opt_state" or "key".
"""

import pickle
import sys

import jax
import numpy as np
from jax import numpy as jnp

import lockstep
from lockstep import record_jax

given, num_steps = dict(word.split("=") for word in sys.argv[2:]), int(sys.argv[1])
x = np.random.default_rng(0).normal(size=(8, 16, 4)).astype(np.float32)
params = {"w": jnp.ones((4, 3)) * 0.1, "b": jnp.zeros(3)}
zeros = jax.tree.map(jnp.zeros_like, params)
state = {"mu": zeros, "nu": zeros, "count": jnp.zeros((), jnp.int32)}
key = jax.random.key(0)
parts, first = {"params": params, "opt_state": state, "key": jax.random.key_data(key)}, 0


def rate(step):
    return 0.01 / (1 + step)


@jax.jit
def train_step(params, state, key, batch):
    key, own = jax.random.split(key)

    def loss_of(params):
        kept = jax.random.bernoulli(own, 0.8, batch.shape)
        return jnp.mean(((batch * kept) @ params["w"] + params["b"] - 1) ** 2)

    loss, gradients = jax.value_and_grad(loss_of)(params)
    gradients = record_jax.keep("raw", gradients)
    count = state["count"] + 1
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state["mu"], gradients)
    nu = jax.tree.map(lambda n, g: 0.999 * n + 0.001 * g**2, state["nu"], gradients)
    params = jax.tree.map(
        lambda p, m, n: p - rate(count - 1) * (m / (1 - 0.9**count))
        / (jnp.sqrt(n / (1 - 0.999**count)) + 1e-8),
        params, mu, nu,
    )  # fmt: skip
    return params, {"mu": mu, "nu": nu, "count": count}, key, loss


if "load" in given:
    with open(given["load"], "rb") as file:
        saved = pickle.load(file)
    first = saved.pop("first")
    saved.pop(given.get("without"), None)
    parts |= saved
params, state, key = parts["params"], parts["opt_state"], jax.random.wrap_key_data(parts["key"])
places = {"params": 0, "opt_state": 1, "key": 2}
settings = {"class": "Adam", "learning_rate": rate, "beta_1": 0.9, "beta_2": 0.999, "epsilon": 1e-8}
with lockstep.record(
    train_step, settings, arguments=places | {"batch": 3}, outputs=places | {"loss": 3}
) as recorded:
    for step in range(first, num_steps):
        params, state, key, loss = recorded(params, state, key, x[step])
if "save" in given:
    parts = {"params": params, "opt_state": state, "key": jax.random.key_data(key)}
    with open(given["save"], "wb") as file:
        pickle.dump(jax.tree.map(np.asarray, parts) | {"first": num_steps}, file)
