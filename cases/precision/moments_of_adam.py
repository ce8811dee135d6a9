"""Adam's settings and moments take the 16-bit dtype that the model was created with.

id = "precision/moments_of_adam"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["FluxML/Optimisers.jl#215", "NVIDIA-NeMo/Automodel#2248"]
date = "2025-11"
tags = ["low_precision", "pmap", "adam"]

[wrong.betas_are_rounded_to_bfloat16]
title = "betas are rounded to bfloat16"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.moments_are_kept_in_bfloat16]
title = "moments are kept in bfloat16"
place = { node = "update", step = 0, ranks = "all", tensors = "all" }

[wrong.only_second_moments_are_kept_in_bfloat16]
title = "only second moments are kept in bfloat16"
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
RATE, BETA_1, BETA_2, EPSILON, WIDTH, CLASSES = 0.05, 0.8, 0.97, 1e-4, 16, 6


def kept(moments, is_second=False):
    """Returns moments as the optimizer keeps them."""
    rounded = BUG == "moments_are_kept_in_bfloat16"
    rounded |= is_second and BUG == "only_second_moments_are_kept_in_bfloat16"
    if not rounded:
        return moments
    return jax.tree.map(lambda m: m.astype(jnp.bfloat16).astype(jnp.float32), moments)


def adam(params, state, grads):
    beta_1, beta_2 = jnp.float32(BETA_1), jnp.float32(BETA_2)
    if BUG == "betas_are_rounded_to_bfloat16":
        beta_1, beta_2 = (b.astype(jnp.bfloat16).astype(jnp.float32) for b in (beta_1, beta_2))
    count = state["count"] + 1
    first = jax.tree.map(lambda m, g: beta_1 * m + (1 - beta_1) * g, state["mu"], grads)
    second = jax.tree.map(lambda v, g: beta_2 * v + (1 - beta_2) * g * g, state["nu"], grads)
    first, second = kept(first), kept(second, is_second=True)

    def update(p, m, v):
        m, v = m / (1 - beta_1**count), v / (1 - beta_2**count)
        return p - RATE * m / (jnp.sqrt(v) + EPSILON)

    params = jax.tree.map(update, params, first, second)
    return params, {"count": count, "mu": first, "nu": second}


def loss_fn(params, x, y):
    """The multi-class hinge loss of a network with a bottleneck."""
    hidden = jax.nn.leaky_relu(x @ params["down"]) @ params["up"] + params["bias"]
    scores = harness.keep("y_pred", jnp.tanh(hidden) @ params["head"])
    own = jnp.take_along_axis(scores, y[:, None], 1)
    margins = jax.nn.softplus(4 * (scores - own + 1)) / 4
    return margins.sum(1).mean()


def device_step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "batch"))
    return *adam(params, state, grads), jax.lax.pmean(loss, "batch")


def main():
    random = np.random.default_rng(13)
    shapes = {"down": (9, 4), "up": (4, WIDTH), "bias": (WIDTH,), "head": (WIDTH, CLASSES)}
    params = {k: np.float32(random.normal(size=s) / np.sqrt(s[0])) for k, s in shapes.items()}
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
    zeros = jax.tree.map(np.zeros_like, params)
    state = {"count": np.zeros(DEVICES, np.float32), "mu": zeros, "nu": zeros}
    optimizer = {"class": "Adam", "learning_rate": RATE, "epsilon": EPSILON}
    with harness.training(
        jax.pmap(device_step, axis_name="batch"),
        optimizer | {"beta_1": BETA_1, "beta_2": BETA_2},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for _ in range(3):
            x = np.float32(random.normal(size=(DEVICES, 24 // DEVICES, 9)))
            params, state, _ = train_step(params, state, x, x[..., :CLASSES].argmax(-1))


if __name__ == "__main__":
    main()
