"""Layers in a scan gather their weights; the gradients come back as parts of sums.

id = "jax/scanned_shards"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["jax-ml/jax: docs/notebooks/shard_map.md", "pytorch/torchtitan#766"]
date = "2025-01"
tags = ["recomputation", "shard_map", "jit", "gathered", "sgd"]

[wrong.each_device_clips_by_norm_of_its_part]
title = "each device clips by the norm of its part"
place = { node = "clipping", step = 0, ranks = "all", tensors = "all" }

[wrong.sums_that_come_back_are_not_divided]
title = "the sums that come back are not divided"
place = { node = "sum", step = 0, ranks = "all", tensors = ["layers"] }

[wrong.gradient_of_head_stays_on_its_device]
title = "the gradient of the head stays on its device"
place = { node = "sum", step = 0, ranks = "all", tensors = ["head"] }
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
LAYERS, WIDTH, RATE, MAX_NORM = 3, 16, 0.5, 0.3
SPECS = {"layers": P(None, "data"), "head": P()}  # Each layer's weights are split by rows.


@jax.checkpoint
def layer(x, part):
    weight = jax.lax.all_gather(part, "data", tiled=True)
    return x + jnp.tanh(x @ weight), None


def loss_fn(params, x, y):
    x, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.square(harness.keep("y_pred", x @ params["head"]) - y).mean()


def clip(grads):
    square = jnp.square(grads["layers"]).sum()
    if BUG != "each_device_clips_by_norm_of_its_part":
        square = jax.lax.psum(square, "data")
    norm = jnp.sqrt(square + jnp.square(grads["head"]).sum())
    return jax.tree.map(lambda g: g * jnp.minimum(1, MAX_NORM / norm), grads)


def device_step(params, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    if BUG != "sums_that_come_back_are_not_divided":
        grads["layers"] = grads["layers"] / DEVICES
    if BUG != "gradient_of_head_stays_on_its_device":
        grads["head"] = jax.lax.pmean(grads["head"], "data")
    grads = harness.keep("sums", grads, SPECS)
    grads = harness.keep("clipped", clip(grads), SPECS)
    params = jax.tree.map(lambda p, g: p - RATE * g, params, grads)
    return params, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    map_over_devices = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(SPECS, P("data"), P("data")),
        out_specs=(SPECS, P()),
        check_vma=False,
    )
    random = np.random.default_rng(0)
    layers = np.float32(random.normal(size=(LAYERS, WIDTH, WIDTH)) / 8)
    layers[:, WIDTH // 2 :] *= 3
    params = {"layers": layers, "head": np.float32(random.normal(size=(WIDTH, 4)) / 4)}
    places = {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}
    params = jax.device_put(params, places)
    with harness.training(
        jax.jit(map_over_devices(device_step)),
        {"class": "SGD", "learning_rate": RATE},
        arguments={"params": 0, "batch": (1, 2)},
        outputs={"params": 0, "loss": 1},
    ) as train_step:
        for _ in range(2):
            x = random.normal(size=(12, WIDTH)).astype(np.float32)
            x[:, : WIDTH // 2] *= 2
            params, _ = train_step(params, x, np.sin(2 * x[:, :4]))


if __name__ == "__main__":
    main()
