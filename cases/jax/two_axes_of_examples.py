"""Examples have two named axes, of vmap and of pmap, and a mean is taken over one of them.

id = "jax/two_axes_of_examples"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["jax-ml/jax#4191", "jax-ml/jax#15335"]
date = "2020-09"
tags = ["pmap", "sgd"]

[wrong.layer_centres_over_vmap_axis_only]
title = "the layer centres over vmap's axis only"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_are_averaged_over_vmap_axis_only]
title = "gradients are averaged over vmap's axis only"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
RATE, MOMENTUM = 0.1, 0.8
EXAMPLE, DEVICE = "example", "device"


def model(params, x):
    """Returns the output of one example, whose hidden layer is centred over all examples."""
    x = x @ params["enter"]
    axes = EXAMPLE if BUG == "layer_centres_over_vmap_axis_only" else (EXAMPLE, DEVICE)
    x = x - jax.lax.pmean(x, axes)
    return jnp.tanh(x + params["shift"]) @ params["leave"]


def losses_fn(params, x, y):
    outputs = jax.vmap(model, (None, 0), axis_name=EXAMPLE)(params, x)
    return jnp.square(harness.keep("y_pred", outputs) - y).mean(-1)


def device_step(params, velocity, x, y):
    def loss_fn(params):
        return losses_fn(params, x, y).mean()

    loss, grads = jax.value_and_grad(loss_fn)(params)
    grads = harness.keep("raw", grads)
    if BUG != "gradients_are_averaged_over_vmap_axis_only":  # As grad of a mean has done.
        grads = jax.lax.pmean(grads, DEVICE)
    grads = harness.keep("sums", grads)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.pmean(loss, DEVICE)


random = np.random.default_rng(0)
params = {
    "enter": np.float32(random.normal(size=(5, 16)) / 2),
    "shift": np.float32(random.normal(size=16) / 2),
    "leave": np.float32(random.normal(size=(16, 3)) / 4),
}
params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
velocity = jax.tree.map(np.zeros_like, params)
with harness.training(
    jax.pmap(device_step, axis_name=DEVICE),
    {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
    arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
    outputs={"params": 0, "opt_state": 1, "loss": 2},
    pmap=True,
) as train_step:
    for _ in range(2):
        x = random.normal(size=(16, 5)).astype(np.float32)
        x[8:] += 0.5
        x = x.reshape(DEVICES, -1, 5)
        params, velocity, _ = train_step(params, velocity, x, np.cos(x[..., :3]))
