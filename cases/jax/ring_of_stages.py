"""A pipeline in shard_map: micro-batches go around a ring of devices, which hold layers each.

id = "jax/ring_of_stages"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["alpa-projects/alpa#405", "young-geng/mintext#2", "marin-community/marin#6532"]
date = "2022-04"
tags = ["accumulation", "shard_map", "jit", "sgd"]

[wrong.sums_over_micro_batches_are_divided]
title = "sums over micro-batches are divided by their number"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_of_embedding_and_head_are_averaged]
title = "gradients of embedding and head are averaged over stages"
place = { node = "sum", step = 0, ranks = "all", tensors = ["embed", "head"] }

[wrong.outputs_count_before_first_micro_batch]
title = "outputs count before the first micro-batch arrives"
place = { node = "loss", step = 0, ranks = [1], tensors = "all" }
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
LAYERS, WIDTH, WORDS, LENGTH, BATCH, MICRO_BATCHES = 4, 12, 9, 5, 8, 4
RATE, MOMENTUM = 0.4, 0.9
SPECS = {"embed": P(), "mix": P("stage"), "bias": P("stage"), "head": P()}


def stage(params, x):
    """Applies the layers of this device: each mixes the words so far, and adds."""
    for mix, bias in zip(params["mix"], params["bias"], strict=True):
        means = jnp.cumsum(x, 1) / jnp.arange(1, LENGTH + 1)[:, None]
        x = x + jnp.tanh(means @ mix + bias)
    return x


def loss_fn(params, tokens, targets):
    """Returns the losses of the last stage; 0 on all others."""
    number = jax.lax.axis_index("stage")
    tokens, targets = (a.reshape(MICRO_BATCHES, -1, LENGTH) for a in (tokens, targets))
    ring = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    x, total = jnp.zeros((BATCH // MICRO_BATCHES, LENGTH, WIDTH)), 0.0
    for tick in range(MICRO_BATCHES + DEVICES - 1):
        entering = params["embed"][tokens[min(tick, MICRO_BATCHES - 1)]]
        x = stage(params, jnp.where(number == 0, entering, x))
        leaving = tick - (DEVICES - 1)
        if leaving >= 0 or BUG == "outputs_count_before_first_micro_batch":
            logs = jax.nn.log_softmax(x @ params["head"])
            losses = -jnp.take_along_axis(logs, targets[leaving][..., None], 2)
            total += jnp.where(number == DEVICES - 1, losses.sum(), 0)
        x = jax.lax.ppermute(x, "stage", ring)
    return total / (BATCH * LENGTH)


def device_step(params, velocity, tokens, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets)
    if BUG == "sums_over_micro_batches_are_divided":
        grads = jax.tree.map(lambda g: g / MICRO_BATCHES, grads)
    is_mean = BUG == "gradients_of_embedding_and_head_are_averaged"
    reduce = jax.lax.pmean if is_mean else jax.lax.psum
    grads |= {name: reduce(grads[name], "stage") for name in ("embed", "head")}
    grads = harness.keep("sums", grads, SPECS)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.psum(loss, "stage")


def main():
    mesh = Mesh(np.array(jax.devices()), ("stage",))
    random = np.random.default_rng(8)
    shapes = {"embed": (WORDS, WIDTH), "mix": (LAYERS, WIDTH, WIDTH), "bias": (LAYERS, WIDTH)}
    shapes["head"] = WIDTH, WORDS
    params = {name: np.float32(random.normal(size=s) / 3) for name, s in shapes.items()}
    places = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.device_put(params, places)
    velocity = jax.tree.map(jnp.zeros_like, params)
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(SPECS, SPECS, P(), P()),
        out_specs=(SPECS, SPECS, P()),
        check_vma=False,
    )(device_step)
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            text = random.integers(WORDS, size=(BATCH, LENGTH + 1)).astype(np.int32)
            batch = jax.device_put((text[:, :-1], text[:, 1:]), NamedSharding(mesh, P()))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
