"""The mask of weight decay is made from parameters that have an axis of devices in front.

id = "jax/decay_mask"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["google-deepmind/optax#25", "huggingface/transformers#11936"]
date = "2021-02"
tags = ["pmap", "adam"]

[wrong.biases_of_all_devices_look_like_matrices]
title = "biases of all devices look like matrices"
place = { node = "update", step = 0, ranks = "all", tensors = [
    "Dense_0/bias",
    "LayerNorm_0/scale",
    "LayerNorm_0/bias",
    "Dense_1/bias",
] }

[wrong.mask_is_flipped]
title = "the mask is flipped"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
RATE, DECAY, BETA_1, BETA_2, EPSILON = 0.02, 0.3, 0.9, 0.99, 1e-6


def init():
    random = np.random.default_rng(0)

    def dense(size, features):
        kernel = np.float32(random.normal(size=(size, features)) / np.sqrt(size))
        return {"kernel": kernel, "bias": np.float32(random.uniform(0.5, 1, features))}

    norm = {"scale": np.ones(16, np.float32), "bias": np.float32(random.uniform(0.5, 1, 16))}
    return {"Dense_0": dense(5, 16), "LayerNorm_0": norm, "Dense_1": dense(16, 2)}


def apply(params, x):
    x = x @ params["Dense_0"]["kernel"] + params["Dense_0"]["bias"]
    x = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)
    x = jax.nn.gelu(x * params["LayerNorm_0"]["scale"] + params["LayerNorm_0"]["bias"])
    return x @ params["Dense_1"]["kernel"] + params["Dense_1"]["bias"]


def make_step(decayed):
    def loss_fn(params, x, y):
        return jnp.square(harness.keep("y_pred", apply(params, x)) - y).mean()

    def adamw(params, state, grads):
        count = state["count"] + 1
        mu = jax.tree.map(lambda m, g: BETA_1 * m + (1 - BETA_1) * g, state["mu"], grads)
        nu = jax.tree.map(lambda v, g: BETA_2 * v + (1 - BETA_2) * g * g, state["nu"], grads)

        def update(p, m, v, is_decayed):
            m, v = m / (1 - BETA_1**count), v / (1 - BETA_2**count)
            return p - RATE * (m / (jnp.sqrt(v) + EPSILON) + DECAY * is_decayed * p)

        state = {"count": count, "mu": mu, "nu": nu}
        return jax.tree.map(update, params, mu, nu, decayed), state

    def device_step(params, state, x, y):
        loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
        grads = harness.keep("raw", grads)
        grads = harness.keep("sums", jax.lax.pmean(grads, "batch"))
        return *adamw(params, state, grads), jax.lax.pmean(loss, "batch")

    return jax.pmap(device_step, axis_name="batch")


def main():
    params = init()
    replicated = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    if BUG == "biases_of_all_devices_look_like_matrices":
        decayed = jax.tree.map(lambda p: p.ndim > 1, replicated)
    elif BUG == "mask_is_flipped":
        decayed = jax.tree.map(lambda p: p.ndim <= 1, params)
    else:
        decayed = jax.tree.map(lambda p: p.ndim > 1, params)
    zeros = jax.tree.map(np.zeros_like, replicated)
    state = {"count": np.zeros(DEVICES, np.int32), "mu": zeros, "nu": zeros}
    optimizer = {"class": "AdamW", "learning_rate": RATE, "weight_decay": DECAY}
    optimizer |= {"beta_1": BETA_1, "beta_2": BETA_2, "epsilon": EPSILON}
    random = np.random.default_rng(1)
    with harness.training(
        make_step(decayed),
        optimizer,
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(2):
            x = random.normal(size=(DEVICES, 12 // DEVICES, 5)).astype(np.float32)
            replicated, state, _ = train_step(replicated, state, x, np.sin(x[..., :2]))


if __name__ == "__main__":
    main()
