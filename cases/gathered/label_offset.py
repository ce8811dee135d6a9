"""Candidates are gathered from all devices, and the labels do not point at the own positives.

id = "gathered/label_offset"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/sentence-transformers#3453", "nreimers/flax-sentence-embeddings#1"]
date = "2025-07"
tags = ["shard_map", "jit", "gathered", "sgd"]

[wrong.labels_have_no_offset_of_device]
title = "labels have no offset of the device"
place = { node = "loss", step = 0, ranks = [1], tensors = "all" }

[wrong.each_device_positives_stand_beside]
title = "each device's positives stand beside its negatives"
place = { node = "loss", step = 0, ranks = [1], tensors = "all" }
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
VOCABULARY, WIDTH, BATCH, SCALE, RATE, MOMENTUM = 18, 12, 8, 5.0, 0.2, 0.9

jax.config.update("jax_num_cpu_devices", DEVICES)


def init_params():
    random = np.random.default_rng(7)
    shapes = {"embed": (VOCABULARY, WIDTH), "hidden": (WIDTH, 24), "out": (24, WIDTH)}
    return {n: jnp.asarray(random.normal(size=s) * 0.4, jnp.float32) for n, s in shapes.items()}


def encode(params, tokens):
    x = jnp.tanh(params["embed"][tokens].mean(1) @ params["hidden"]) @ params["out"]
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def candidates_of(positives, negatives):
    """Returns the positives of all devices, then the hard negatives of all."""
    gather = functools.partial(jax.lax.all_gather, axis_name="data", tiled=True)
    if BUG == "each_device_positives_stand_beside":
        return gather(jnp.concatenate([positives, negatives]))
    return jnp.concatenate([gather(positives), gather(negatives)])


def loss_fn(params, anchors, positives, negatives):
    """Returns the device's part of the mean over all anchors."""
    a, p, n = (encode(params, tokens) for tokens in (anchors, positives, negatives))
    scores = SCALE * a @ candidates_of(p, n).T
    labels = jnp.arange(len(a))
    if BUG != "labels_have_no_offset_of_device":
        labels += jax.lax.axis_index("data") * len(a)
    log_chances = jax.nn.log_softmax(scores)
    return -jnp.take_along_axis(log_chances, labels[:, None], 1).sum() / BATCH


def train_step(params, velocity, anchors, positives, negatives):
    loss, grads = jax.value_and_grad(loss_fn)(params, anchors, positives, negatives)
    loss, grads = jax.lax.psum((loss, grads), "data")
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - RATE * v, params, velocity), velocity, loss


def main():
    mesh, split = Mesh(np.array(jax.devices()), ("data",)), P("data")
    mapped = jax.shard_map(
        train_step, mesh=mesh, in_specs=(P(), P(), split, split, split),
        out_specs=(P(), P(), P()), check_vma=False,
    )  # fmt: skip
    params = init_params()
    velocity = jax.tree.map(jnp.zeros_like, params)
    random = np.random.default_rng(1)
    settings = {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM}
    with harness.training(
        jax.jit(mapped), settings,
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3, 4)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as step:  # fmt: skip
        for _ in range(2):
            batch = random.integers(VOCABULARY, size=(3, BATCH, 6))
            params, velocity, _ = step(params, velocity, *batch)


main()
