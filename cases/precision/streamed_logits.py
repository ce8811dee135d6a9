"""A cross-entropy goes through its words in blocks, forwards in other digits than backwards.

id = "precision/streamed_logits"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["marin-community/marin#8217"]
date = "2026-08"
tags = ["low_precision", "shard_map", "jit", "sgd"]

[wrong.logits_of_forward_pass_are_bfloat16]
title = "logits of the forward pass are bfloat16"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.logarithm_of_sum_is_kept_in_bfloat16]
title = "the logarithm of the sum is kept in bfloat16"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import functools
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
TOKENS, WIDTH, WORDS, BLOCK, RATE, MOMENTUM = 32, 10, 24, 6, 0.1, 0.9


def rounded(x):
    return x.astype(jnp.bfloat16).astype(jnp.float32)


@jax.custom_vjp
def cross_entropy(x, head, words):
    return cross_entropy_forward(x, head, words)[0]


def cross_entropy_forward(x, head, words):
    """Returns the losses, and the logarithms of sums that its gradient needs."""
    total, own = jnp.full(len(x), -jnp.inf), jnp.zeros(len(x))
    for start in range(0, WORDS, BLOCK):
        logits = x @ head[:, start : start + BLOCK]
        if BUG == "logits_of_forward_pass_are_bfloat16":
            logits = rounded(logits)
        total = jnp.logaddexp(total, jax.nn.logsumexp(logits, 1))
        own += (logits * jax.nn.one_hot(words - start, BLOCK)).sum(1)
    if BUG == "logarithm_of_sum_is_kept_in_bfloat16":
        total = rounded(total)
    return total - own, (x, head, words, total)


def cross_entropy_backward(kept, gradient):
    x, head, words, total = kept
    x_gradient, head_gradients = jnp.zeros_like(x), []
    for start in range(0, WORDS, BLOCK):
        block = head[:, start : start + BLOCK]
        chances = jnp.exp(x @ block - total[:, None])
        logits = (chances - jax.nn.one_hot(words - start, BLOCK)) * gradient[:, None]
        x_gradient += logits @ block.T
        head_gradients.append(x.T @ logits)
    return x_gradient, jnp.concatenate(head_gradients, 1), None


cross_entropy.defvjp(cross_entropy_forward, cross_entropy_backward)


def loss_fn(params, x, words):
    hidden = x + jax.nn.hard_tanh(x @ params["mix"]) @ params["out"]
    hidden = harness.keep("y_pred", hidden)
    return cross_entropy(hidden, params["head"], words).mean()


def device_step(params, velocity, x, words):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, words)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "data"))
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    random = np.random.default_rng(1)
    shapes = {"mix": (WIDTH, WIDTH), "out": (WIDTH, WIDTH), "head": (WIDTH, WORDS)}
    params = {name: np.float32(random.normal(size=s) / 3) for name, s in shapes.items()}
    params["head"] *= 2
    params = jax.device_put(params, NamedSharding(mesh, P()))
    velocity = jax.tree.map(jnp.zeros_like, params)
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )(device_step)
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            x = np.float32(9 * random.normal(size=(TOKENS, WIDTH)))  # Logits of up to 100.
            words = random.integers(WORDS, size=TOKENS).astype(np.int32)
            batch = jax.device_put((x, words), NamedSharding(mesh, P("data")))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
