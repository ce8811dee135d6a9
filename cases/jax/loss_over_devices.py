"""The loss is averaged over the devices of pmap before it is differentiated on each.

id = "jax/loss_over_devices"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["jax-ml/jax#3970"]
date = "2020-08"
tags = ["pmap", "sgd"]

[wrong.mean_of_loss_is_taken_for_that_of_gradients]
title = "the mean of the loss is taken for that of the gradients"
place = { node = "sum", step = 0, ranks = "all", tensors = "all" }

[wrong.loss_is_summed_over_devices]
title = "the loss is summed over the devices"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
LOCAL_ONLY = BUG == "mean_of_loss_is_taken_for_that_of_gradients"
SUMMED = BUG == "loss_is_summed_over_devices"


class Net:
    """A convolution and a dense layer."""

    def __init__(self, seed):
        random = np.random.default_rng(seed)
        self.start = {
            "conv": np.float32(random.normal(size=(3, 3, 1, 8)) / 3),
            "dense": np.float32(random.normal(size=(8, 4)) / 3),
            "bias": np.zeros(4, np.float32),
        }

    def __call__(self, params, image):
        x = jax.lax.conv_general_dilated(
            image, params["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jax.nn.softplus(x).mean((1, 2)) @ params["dense"] + params["bias"]


net = Net(0)


def loss_fn(params, image, target):
    prediction = harness.keep("y_pred", net(params, image))
    local = jnp.square(prediction - target).mean()
    if LOCAL_ONLY:
        return jax.lax.pmean(local, "batch"), local
    return (jax.lax.psum(local, "batch") if SUMMED else local), local


def device_step(params, image, target):
    (_, loss), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, image, target)
    grads = harness.keep("raw", grads)
    if not LOCAL_ONLY:
        grads = jax.lax.pmean(grads, "batch")
    grads = harness.keep("sums", grads)
    params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
    return params, jax.lax.pmean(loss, "batch")


params = jax.tree.map(lambda p: np.stack([p] * DEVICES), net.start)
random = np.random.default_rng(1)
with harness.training(
    jax.pmap(device_step, axis_name="batch"),
    {"class": "SGD", "learning_rate": 0.5},
    arguments={"params": 0, "batch": (1, 2)},
    outputs={"params": 0, "loss": 1},
    pmap=True,
) as train_step:
    for _ in range(2):
        image = random.normal(size=(DEVICES, 12 // DEVICES, 8, 8, 1)).astype(np.float32)
        target = image[:, :, :2, :2, 0].reshape(DEVICES, -1, 4)
        params, _ = train_step(params, image, target)
