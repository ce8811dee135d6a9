"""The gradients of replicated LoRA factors are averaged for some, or added.

id = "adapters/lora_jax_tree"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["hao-ai-lab/FastVideo#1666", "davisyoshida/lorax: examples/simple.py"]
date = "2026-07"
tags = ["shard_map", "jit", "lora"]

[wrong.only_gradients_of_b_are_averaged]
title = "only the gradients of B are averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = ["*.a"] }

[wrong.gradients_are_added_not_averaged]
title = "gradients are added, not averaged"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.number_of_devices_is_seed_of_a_and_b]
title = "the number of devices is the seed of A and B"
place = { node = "start", step = 0, ranks = "all", tensors = "all" }
"""

import functools
import itertools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
SIZES, RANK, ALPHA = (6, 12, 4), 3, 6.0
LEARNING_RATE = 0.2


def init_base():
    random = np.random.default_rng(0)
    return [
        np.float32(random.normal(size=shape) / np.sqrt(shape[0]))
        for shape in itertools.pairwise(SIZES)
    ]


def init_lora():
    keys = jax.random.split(jax.random.key(1), 2 * len(SIZES))
    if DEVICES > 1 and BUG == "number_of_devices_is_seed_of_a_and_b":
        keys = jax.random.split(jax.random.key(DEVICES), 2 * len(SIZES))
    lora = []
    for index, (size, features) in enumerate(itertools.pairwise(SIZES)):
        a = jax.random.normal(keys[2 * index], (size, RANK)) * 0.3
        b = jax.random.normal(keys[2 * index + 1], (RANK, features)) * 0.1
        lora.append({"a": a, "b": b})
    return lora


def loss_fn(lora, base, x, y):
    for index, (w, factors) in enumerate(zip(base, lora, strict=True)):
        x = x @ w + (ALPHA / RANK) * (x @ factors["a"]) @ factors["b"]
        x = jax.nn.gelu(x) if index < len(base) - 1 else x
    return -jnp.take_along_axis(jax.nn.log_softmax(x), y[:, None], 1).mean()


def average(grads):
    reduce = jax.lax.psum if BUG == "gradients_are_added_not_averaged" else jax.lax.pmean
    if BUG == "only_gradients_of_b_are_averaged":
        return [{"a": g["a"], "b": reduce(g["b"], "data")} for g in grads]
    return reduce(grads, "data")


def make_step(base):
    mesh = Mesh(np.array(jax.devices()[:DEVICES]), ("data",))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )
    def train_step(lora, squares, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(lora, base, x, y)
        grads = average(grads)
        squares = jax.tree.map(lambda s, g: s + g * g, squares, grads)
        lora = jax.tree.map(
            lambda p, g, s: p - LEARNING_RATE * g / (jnp.sqrt(s) + 1e-2), lora, grads, squares
        )
        return lora, squares, jax.lax.pmean(loss, "data")

    return train_step


def main():
    lora, base = init_lora(), init_base()
    squares = jax.tree.map(jnp.zeros_like, lora)
    places = {"params": 0, "opt_state": 1}
    arguments, outputs = {**places, "batch": (2, 3)}, {**places, "loss": 2}
    random = np.random.default_rng(3)
    recorder = harness.training(make_step(base), arguments=arguments, outputs=outputs)
    with recorder as step:
        for _ in range(2):
            x = random.normal(size=(16, 6)).astype(np.float32)
            lora, squares, _ = step(lora, squares, x, x[:, :4].argmax(1))


if __name__ == "__main__":
    main()
