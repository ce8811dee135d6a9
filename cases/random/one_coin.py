"""A step augments its images by chance: each image has a coin of its own, or the batch has one.

id = "random/one_coin"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["keras-team/keras#23121"]
date = "2026-08"
tags = ["shard_map", "jit", "sgd"]

[wrong.all_images_of_device_have_one_coin]
title = "all images of a device have one coin"
place = { node = "random", step = 0, ranks = "all", tensors = "all" }

[wrong.coins_of_devices_are_equal]
title = "coins of the devices are equal"
place = { node = "random", step = 0, ranks = [1], tensors = "all" }

[wrong.each_step_throws_coins_of_first]
title = "each step throws the coins of the first"
place = { node = "random", step = 1, ranks = "all", tensors = "all" }
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
BATCH, SIZE, RATE, MOMENTUM = 16, 6, 0.3, 0.9


def flipped(key, images, count):
    """Mirrors about a half of the images of this device."""
    key = jax.random.fold_in(key, 0 if BUG == "each_step_throws_coins_of_first" else count)
    coins = jax.random.bernoulli(key, 0.5, (BATCH,))
    if BUG == "all_images_of_device_have_one_coin":
        coins = jnp.full((BATCH,), coins[jax.lax.axis_index("data")])
    number = 0 if BUG == "coins_of_devices_are_equal" else jax.lax.axis_index("data")
    own = jax.lax.dynamic_slice_in_dim(coins, number * len(images), len(images))
    return jnp.where(own[:, None, None], images[:, :, ::-1], images)


def loss_fn(params, images, targets):
    rows = jnp.tanh(images @ params["rows"] + params["bias"])
    outputs = harness.keep("y_pred", jnp.einsum("bij,ijk->bk", rows, params["out"]))
    return jnp.square(outputs - targets).sum(1).mean()


def device_step(params, velocity, count, key, images, targets):
    images = flipped(key, images, count)
    loss, grads = jax.value_and_grad(loss_fn)(params, images, targets)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "data"))
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, count + 1, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    random = np.random.default_rng(17)
    shapes = {"rows": (SIZE, 5), "bias": (5,), "out": (SIZE, 5, 2)}
    params = {name: np.float32(random.normal(size=s) / 4) for name, s in shapes.items()}
    state = params, jax.tree.map(np.zeros_like, params), np.int32(0), jax.random.key(30)
    params, velocity, count, key = jax.device_put(state, NamedSharding(mesh, P()))
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P(), P(), P("data"), P("data")),
        out_specs=(P(), P(), P(), P()),
        check_vma=False,
    )(device_step)
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": (1, 2), "key": 3, "batch": (4, 5)},
        outputs={"params": 0, "opt_state": (1, 2), "loss": 3},
    ) as train_step:
        for _ in range(2):
            images = np.float32(random.normal(size=(BATCH, SIZE, SIZE)))
            batch = images, images[:, :2, 0] - images[:, :2, -1]
            batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
            params, velocity, count, _ = train_step(params, velocity, count, key, *batch)


if __name__ == "__main__":
    main()
