"""Keys go around a ring of devices, and with them go their places and the documents they are of.

id = "jax/ring_of_keys"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["NVIDIA/TransformerEngine#2349"]
date = "2025-11"
tags = ["shard_map", "jit", "sgd"]

[wrong.places_of_keys_stay_at_home]
title = "places of keys stay at home"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.documents_of_keys_stay_at_home]
title = "documents of keys stay at home"
place = { node = "outputs", step = 0, ranks = [1], tensors = "all" }

[wrong.gradients_are_averaged_over_parts]
title = "gradients are averaged over parts of the sequence"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
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
WORDS, WIDTH, LENGTH, BATCH, RATE, MOMENTUM = 12, 10, 16, 4, 0.5, 0.9


def attend(queries, keys, values, places, documents):
    """Returns the attention of own queries to the keys of all devices."""
    own_places, own_documents = places, documents
    total, weight = 0.0, 0.0
    ring = [(i, (i + 1) % DEVICES) for i in range(DEVICES)]
    for _ in range(DEVICES):
        scores = jnp.exp(jnp.tanh(queries @ keys.swapaxes(1, 2)))
        seen = own_places[:, :, None] >= places[:, None]
        seen &= own_documents[:, :, None] == documents[:, None]
        scores = jnp.where(seen, scores, 0)
        total, weight = total + scores @ values, weight + scores.sum(-1, keepdims=True)
        keys, values = jax.lax.ppermute((keys, values), "seq", ring)
        if BUG != "places_of_keys_stay_at_home":
            places = jax.lax.ppermute(places, "seq", ring)
        if BUG != "documents_of_keys_stay_at_home":
            documents = jax.lax.ppermute(documents, "seq", ring)
    return total / jnp.maximum(weight, 1e-6)


def loss_fn(params, tokens, targets, places, documents):
    x = params["embed"][tokens]
    queries, keys, values = (x @ params[name] for name in ("query", "key", "value"))
    x = x + attend(queries, keys, values, places, documents)
    logits = harness.keep("y_pred", x @ params["head"], P(None, "seq"))
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], 2)
    return losses.sum() / (BATCH * LENGTH)


def device_step(params, velocity, batch):
    loss, grads = jax.value_and_grad(loss_fn)(params, *batch)
    is_mean = BUG == "gradients_are_averaged_over_parts"
    grads = (jax.lax.pmean if is_mean else jax.lax.psum)(grads, "seq")
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.psum(loss, "seq")


def batches():
    random = np.random.default_rng(7)
    for _ in range(2):
        text = random.integers(WORDS, size=(BATCH, LENGTH + 1)).astype(np.int32)
        places = np.tile(np.arange(LENGTH, dtype=np.int32), (BATCH, 1))
        documents = np.int32(places >= np.array([3, 6, 10, 13])[:, None])
        yield text[:, :-1], text[:, 1:], places, documents


def main():
    random = np.random.default_rng(0)
    shapes = dict.fromkeys(("query", "key", "value"), (WIDTH, WIDTH))
    shapes |= {"embed": (WORDS, WIDTH), "head": (WIDTH, WORDS)}
    params = {name: np.float32(random.normal(size=shape) / 3) for name, shape in shapes.items()}
    mesh = Mesh(np.array(jax.devices()), ("seq",))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    velocity = jax.tree.map(jnp.zeros_like, params)
    step = jax.shard_map(
        device_step,
        mesh=mesh,
        in_specs=(P(), P(), P(None, "seq")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": 2},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for batch in batches():
            batch = jax.device_put(batch, NamedSharding(mesh, P(None, "seq")))
            params, velocity, _ = train_step(params, velocity, batch)


if __name__ == "__main__":
    main()
