"""A step of JAX averages the devices' means of unmasked tokens, with a penalty on the logits.

id = "losses/masked_pmean"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#19494", "huggingface/transformers#18297"]
date = "2022-10"
tags = ["shard_map", "jit", "sgd"]

[wrong.mean_of_devices_means]
title = "the mean of the devices' means"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.penalty_is_mean_over_own_tokens]
title = "the penalty is a mean over the own tokens"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.sum_is_averaged_over_devices]
title = "the sum is averaged over devices"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
VOCABULARY, LENGTH, WIDTH, Z_LOSS, RATE = 12, 8, 16, 0.1, 0.5

jax.config.update("jax_num_cpu_devices", DEVICES)


def init_params():
    random = np.random.default_rng(0)
    shapes = {"embed": (VOCABULARY, WIDTH), "mix": (LENGTH, LENGTH), "head": (WIDTH, VOCABULARY)}
    return {n: jnp.asarray(random.normal(size=s) * 0.3, jnp.float32) for n, s in shapes.items()}


def apply(params, tokens):
    x = params["embed"][tokens]
    x = x + jnp.einsum("ts,bsw->btw", jnp.tril(params["mix"]), jnp.tanh(x))
    return x @ params["head"]


def loss_fn(params, tokens, targets, mask):
    """Returns the device's part of the loss."""
    logits = apply(params, tokens)
    log_z = jax.nn.logsumexp(logits, -1)
    losses = log_z - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    own, number = mask.sum(), jax.lax.psum(mask.sum(), "data")
    if BUG == "mean_of_devices_means":
        return jnp.sum((losses + Z_LOSS * log_z**2) * mask) / own / DEVICES
    penalty = Z_LOSS * jnp.sum(log_z**2 * mask)
    if BUG == "penalty_is_mean_over_own_tokens":
        return jnp.sum(losses * mask) / number + penalty / own / DEVICES
    return (jnp.sum(losses * mask) + penalty) / number


mesh = Mesh(np.array(jax.devices()), ("data",))


@jax.jit
@functools.partial(
    jax.shard_map,
    mesh=mesh,
    in_specs=(P(), P("data"), P("data"), P("data")),
    out_specs=(P(), P()),
    check_vma=False,
)
def train_step(params, tokens, targets, mask):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets, mask)
    combine = jax.lax.pmean if BUG == "sum_is_averaged_over_devices" else jax.lax.psum
    grads = combine(grads, "data")
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), jax.lax.psum(loss, "data")


def get_batch(step):
    """Returns tokens, targets and a mask; the second half of the examples is short."""
    random = np.random.default_rng(step)
    tokens = random.integers(VOCABULARY, size=(8, LENGTH + 1))
    mask = np.arange(LENGTH) < np.array([8, 7, 8, 6, 2, 3, 1, 2])[:, None]
    return tokens[:, :-1], tokens[:, 1:], mask.astype(np.float32)


def main():
    params = init_params()
    places = {"arguments": {"params": 0, "batch": (1, 2, 3)}, "outputs": {"params": 0, "loss": 1}}
    settings = {"class": "SGD", "learning_rate": RATE}
    with harness.training(train_step, settings, **places) as step:
        for number in range(2):
            params, _ = step(params, *get_batch(number))


if __name__ == "__main__":
    main()
