"""Layers in a scan gather their weights; the gradients come back as parts of sums.

reference = "jax-ml/jax: docs/notebooks/shard_map.md, pytorch/torchtitan#766"
date = "2025-01"
framework = "jax"

[wrong]
"each device clips by the norm of its part" = ["clipped_by_local_norm", "other_clipping"]
"the sums that come back are not divided" = ["sum_instead_of_mean", "scaled_gradient"]
"the gradient of the head stays on its device" = [
    "partly_all_reduced",
    "diverged_replicas",
    "not_all_reduced",
]
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lockstep
from lockstep import record_jax

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
    return jnp.square(record_jax.keep("y_pred", x @ params["head"]) - y).mean()


def clip(grads):
    square = jnp.square(grads["layers"]).sum()
    if BUG != "each device clips by the norm of its part":
        square = jax.lax.psum(square, "data")
    norm = jnp.sqrt(square + jnp.square(grads["head"]).sum())
    return jax.tree.map(lambda g: g * jnp.minimum(1, MAX_NORM / norm), grads)


def device_step(params, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    if BUG != "the sums that come back are not divided":
        grads["layers"] = grads["layers"] / DEVICES
    if BUG != "the gradient of the head stays on its device":
        grads["head"] = jax.lax.pmean(grads["head"], "data")
    grads = record_jax.keep("sums", grads, SPECS)
    grads = record_jax.keep("clipped", clip(grads), SPECS)
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
    with lockstep.record(
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
