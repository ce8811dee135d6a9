"""VeRA: all layers share two fixed random matrices, and train vectors that scale them.

id = "adapters/drawn_projections"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/peft#1564", "huggingface/peft#1039"]
date = "2023-10"
tags = ["pmap", "lora", "sgd"]

[wrong.each_device_draws_matrices]
title = "each device draws the matrices"
place = { node = "start", step = 0, ranks = [1], tensors = ["a", "b"] }

[wrong.number_of_devices_is_part_of_key]
title = "the number of devices is part of the key"
place = { node = "start", step = 0, ranks = "all", tensors = ["a", "b"] }

[wrong.last_layer_has_matrices_of_another_key]
title = "the last layer has matrices of another key"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
WIDTH, LORA_RANK, LAYERS, BATCH, RATE, MOMENTUM = 10, 6, 3, 16, 0.2, 0.9


def draw(seed):
    """Returns the matrices that all layers share."""
    first, second = jax.random.split(jax.random.key(seed))
    return {
        "a": jax.random.normal(first, (WIDTH, LORA_RANK)) / WIDTH**0.5,
        "b": jax.random.normal(second, (LORA_RANK, WIDTH)) / LORA_RANK**0.5,
    }


def init():
    random = np.random.default_rng(2)
    base = np.float32(random.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5)
    d = np.full((LAYERS, LORA_RANK), 0.5, np.float32)
    b = np.float32(0.3 * random.normal(size=(LAYERS, WIDTH)))
    return base, {"d": d, "b": b}


BASE, START = init()


def loss_fn(params, shared, x, y):
    for layer in range(LAYERS):
        if BUG == "last_layer_has_matrices_of_another_key" and layer == LAYERS - 1:
            shared = draw(8)
        change = (x @ shared["a"] * params["d"][layer]) @ shared["b"] * params["b"][layer]
        x = x + jnp.tanh(x @ BASE[layer] + change)
    outputs = harness.keep("y_pred", x[:, :3])
    return -jnp.take_along_axis(jax.nn.log_softmax(outputs), y[:, None], 1).mean()


def device_step(params, velocity, shared, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, shared, x, y)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "batch"))
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, shared, jax.lax.pmean(loss, "batch")


def main():
    seeds = [7] * DEVICES
    if BUG == "each_device_draws_matrices":
        seeds = [7 + device for device in range(DEVICES)]
    elif BUG == "number_of_devices_is_part_of_key":
        seeds = [7 * DEVICES] * DEVICES
    shared = jax.tree.map(lambda *copies: np.stack(copies), *[draw(seed) for seed in seeds])
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), START)
    velocity = jax.tree.map(np.zeros_like, params)
    random = np.random.default_rng(0)
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "state": 2, "batch": (3, 4)},
        outputs={"params": 0, "opt_state": 1, "state": 2, "loss": 3},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            x = np.float32(random.normal(size=(DEVICES, BATCH // DEVICES, WIDTH)))
            y = x[..., :3].argmax(-1)
            params, velocity, shared, _ = train_step(params, velocity, shared, x, y)


if __name__ == "__main__":
    main()
