"""Losses over tokens that are not padding are averaged per device, and then over devices.

id = "jax/tokens_per_device"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["huggingface/transformers#19494"]
date = "2022-10"
tags = ["pmap", "gathered", "sgd"]

[wrong.pmean_of_means_of_devices]
title = "pmean of the means of the devices"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.tokens_of_first_device_are_counted_for_all]
title = "the tokens of the first device are counted for all"
place = { node = "loss", step = 0, ranks = "all", tensors = "all" }

[wrong.count_has_padding_in_it]
title = "the count has padding in it"
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
WORDS, WIDTH, LENGTH, RATE, MOMENTUM = 20, 12, 9, 0.3, 0.9


def init():
    random = np.random.default_rng(0)
    shapes = {"embed": (WORDS, WIDTH), "gates": (2 * WIDTH, WIDTH), "new": (2 * WIDTH, WIDTH)}
    shapes["head"] = (WIDTH, WORDS)
    return {name: np.float32(0.4 * random.normal(size=s)) for name, s in shapes.items()}


def language_model(params, tokens):
    """A small gated recurrent network; returns logits of the next tokens."""

    def cell(state, word):
        both = jnp.concatenate([state, word], -1)
        gate = jax.nn.sigmoid(both @ params["gates"])
        state = gate * state + (1 - gate) * jnp.tanh(both @ params["new"])
        return state, state

    words = params["embed"][tokens].swapaxes(0, 1)
    _, states = jax.lax.scan(cell, jnp.zeros_like(words[0]), words)
    return states.swapaxes(0, 1) @ params["head"]


def loss_fn(params, tokens, mask):
    logits = harness.keep("y_pred", language_model(params, tokens[:, :-1]))
    log_probs = jax.nn.log_softmax(logits)
    losses = -jnp.take_along_axis(log_probs, tokens[:, 1:, None], 2)[..., 0]
    return (losses * mask[:, 1:]).sum(), mask[:, 1:].sum()


def device_step(params, velocity, tokens, mask):
    (total, count), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, tokens, mask)
    if BUG == "pmean_of_means_of_devices":
        grads = jax.tree.map(lambda g: g / count, grads)
        grads, loss = jax.lax.pmean((grads, total / count), "batch")
    else:
        if BUG == "tokens_of_first_device_are_counted_for_all":
            whole = DEVICES * jax.lax.all_gather(count, "batch")[0]
        elif BUG == "count_has_padding_in_it":
            whole = DEVICES * mask[:, 1:].size
        else:
            whole = jax.lax.psum(count, "batch")
        grads = jax.tree.map(lambda g: jax.lax.psum(g, "batch") / whole, grads)
        loss = jax.lax.psum(total, "batch") / whole
    grads = harness.keep("sums", grads)
    moved = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    update = jax.tree.map(lambda p, v, g: p - RATE * (g + MOMENTUM * v), params, moved, grads)
    return update, moved, loss


def batches():
    random = np.random.default_rng(1)
    for _ in range(2):
        tokens = random.integers(1, WORDS, (8, LENGTH)).astype(np.int32)
        lengths = np.array([9, 8, 9, 7, 3, 4, 2, 5])
        mask = np.float32(np.arange(LENGTH) < lengths[:, None])
        yield tokens * mask.astype(np.int32), mask


def main():
    params = jax.tree.map(lambda p: np.stack([p] * DEVICES), init())
    velocity = jax.tree.map(np.zeros_like, params)
    step = jax.pmap(device_step, axis_name="batch")
    with harness.training(
        step,
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM, "nesterov": True},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
        pmap=True,
    ) as train_step:
        for batch in batches():
            tokens, mask = (x.reshape(DEVICES, -1, LENGTH) for x in batch)
            params, velocity, _ = train_step(params, velocity, tokens, mask)


if __name__ == "__main__":
    main()
