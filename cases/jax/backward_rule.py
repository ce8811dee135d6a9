"""A layer has its own backward rule, which adds its gradient up over the devices, or should not.

id = "jax/backward_rule"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["jax-ml/jax#19174"]
date = "2024-01"
tags = ["pmap"]

[wrong.rule_adds_up_and_step_takes_mean]
title = "the rule adds up, and the step takes the mean"
place = { node = "sum", step = 0, ranks = "all", tensors = ["fused"] }

[wrong.only_layer_with_rule_is_reduced]
title = "only the layer with the rule is reduced"
place = { node = "sum", step = 0, ranks = "all", tensors = ["out", "bias"] }

[wrong.rule_forgets_slope_of_its_activation]
title = "the rule forgets the slope of its activation"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["fused"] }
"""

import os

import jax
import jax.numpy as jnp
import numpy as np

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
WIDTH, RATE, DECAY = 12, 0.01, 0.8


@jax.custom_vjp
def fused(x, weight):
    """Multiplies and applies tanh in one kernel."""
    return jnp.tanh(x @ weight)


def fused_forward(x, weight):
    y = fused(x, weight)
    return y, (x, weight, y)


def fused_backward(kept, gradient):
    x, weight, y = kept
    if BUG != "rule_forgets_slope_of_its_activation":
        gradient = gradient * (1 - y * y)
    weight_gradient = x.T @ gradient
    if BUG == "rule_adds_up_and_step_takes_mean":
        weight_gradient = jax.lax.psum(weight_gradient, "batch")
    return gradient @ weight.T, weight_gradient


fused.defvjp(fused_forward, fused_backward)


def loss_fn(params, x, y):
    hidden = fused(x, params["fused"])
    logits = harness.keep("y_pred", hidden @ params["out"] + params["bias"])
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def reduce(grads):
    means = jax.lax.pmean(grads, "batch")
    if BUG == "only_layer_with_rule_is_reduced":
        return {**grads, "fused": means["fused"]}
    return means


def device_step(params, state, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = harness.keep("sums", reduce(harness.keep("raw", grads)))
    state = jax.tree.map(lambda s, g: DECAY * s + (1 - DECAY) * g * g, state, grads)
    params = jax.tree.map(lambda p, s, g: p - RATE * g / (jnp.sqrt(s) + 1e-3), params, state, grads)
    return params, state, jax.lax.pmean(loss, "batch")


random = np.random.default_rng(5)
params = {
    "fused": np.float32(random.normal(size=(7, WIDTH)) / 2),
    "out": np.float32(random.normal(size=(WIDTH, 4)) / 3),
    "bias": np.zeros(4, np.float32),
}
params = jax.tree.map(lambda p: np.stack([p] * DEVICES), params)
state = jax.tree.map(np.zeros_like, params)
with harness.training(
    jax.pmap(device_step, axis_name="batch"),
    {"class": "RMSprop", "learning_rate": RATE, "rho": DECAY, "epsilon": 1e-3},
    arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
    outputs={"params": 0, "opt_state": 1, "loss": 2},
    pmap=True,
) as train_step:
    for _ in range(2):
        x = np.float32(random.normal(size=(16, 7)))
        y = x[:, :4].argmax(1)
        x, y = x.reshape(DEVICES, -1, 7), y.reshape(DEVICES, -1)
        params, state, _ = train_step(params, state, x, y)
