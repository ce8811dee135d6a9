"""A contrastive loss over the features of all devices, gathered with or without a gradient.

id = "jax/gathered_features"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["mlfoundations/open_clip#616", "vturrisi/solo-learn#258"]
date = "2023-09"
tags = ["shard_map", "jit", "gathered", "sgd"]

[wrong.gathered_features_have_no_gradient]
title = "gathered features have no gradient"
place = { node = "gradient", step = 0, ranks = "all", tensors = "all" }

[wrong.each_device_compares_its_own_pairs]
title = "each device compares its own pairs"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.every_device_computes_whole_loss]
title = "every device computes the whole loss, and gradients are summed"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

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
RATE, MOMENTUM, TEMPERATURE = 0.2, 0.9, 0.5
WHOLE = BUG == "every_device_computes_whole_loss"


def tower(params, x):
    x = jax.nn.gelu(x @ params["in"] + params["bias"]) @ params["out"]
    return x * jax.lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


def loss_fn(params, image, text):
    a, b = tower(params["image"], image), tower(params["text"], text)
    a, b = harness.keep("y_pred", (a, b))
    if BUG == "each_device_compares_its_own_pairs":
        all_a, all_b, first = a, b, 0
    else:
        all_a, all_b = (jax.lax.all_gather(z, "data", tiled=True) for z in (a, b))
        first = len(a) * jax.lax.axis_index("data")
    if BUG == "gathered_features_have_no_gradient":
        all_a, all_b = jax.lax.stop_gradient((all_a, all_b))
    if WHOLE:
        a, b, first = all_a, all_b, 0
    own = first + jnp.arange(len(a))[:, None]

    def cross_entropy(logits):
        return -jnp.take_along_axis(jax.nn.log_softmax(logits), own, 1).mean()

    return (cross_entropy(a @ all_b.T / TEMPERATURE) + cross_entropy(b @ all_a.T / TEMPERATURE)) / 2


def device_step(params, velocity, image, text):
    loss, grads = jax.value_and_grad(loss_fn)(params, image, text)
    grads = harness.keep("raw", grads)
    reduce = jax.lax.psum if WHOLE else jax.lax.pmean
    grads = harness.keep("sums", reduce(grads, "data"))
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.pmean(loss, "data")


def main():
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = (P(), P(), P("data"), P("data"))
    step = jax.shard_map(device_step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    random = np.random.default_rng(0)

    def new_tower():
        shapes = {"in": (8, 16), "bias": (16,), "out": (16, 6)}
        return {name: np.float32(random.normal(size=s) / 3) for name, s in shapes.items()}

    params = {"image": new_tower(), "text": new_tower()}
    velocity = jax.tree.map(np.zeros_like, params)
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            image = random.normal(size=(12, 8)).astype(np.float32)
            text = np.tanh(image + 0.3 * random.normal(size=(12, 8))).astype(np.float32)
            params, velocity, _ = train_step(params, velocity, image, text)


if __name__ == "__main__":
    main()
