"""A linear recurrence over parts of a sequence: each device starts from the state of those before.

id = "parallel/passed_states"
framework = "jax"
processes = 4
steps = 2
mode = "pair"
references = ["open-lm-engine/accelerated-model-architectures#445", "NVIDIA/Megatron-LM#6808"]
date = "2026-05"
tags = ["shard_map", "jit", "gathered", "sgd"]

[wrong.each_part_starts_from_zeros]
title = "each part starts from zeros"
place = { node = "outputs", step = 0, ranks = [1, 2, 3], tensors = "all" }

[wrong.states_of_earlier_parts_do_not_decay]
title = "states of earlier parts do not decay"
place = { node = "outputs", step = 0, ranks = [2, 3], tensors = "all" }

[wrong.gradient_of_passed_state_is_lost]
title = "the gradient of a passed state is lost"
place = { node = "gradient", step = 0, ranks = [0, 1, 2], tensors = ["decay", "input", "embed"] }
"""

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
WORDS, WIDTH, LENGTH, BATCH, RATE, MOMENTUM = 11, 8, 16, 4, 0.5, 0.9


def scan(decay, inputs):
    """Returns the states of h = decay * h + input from zeros, and the products of the decays."""

    def join(left, right):
        return left[0] * right[0], right[0] * left[1] + right[1]

    products, states = jax.lax.associative_scan(join, (decay, inputs), axis=1)
    return states, products


def recur(decay, inputs):
    states, products = scan(decay, inputs)
    last, whole = jax.lax.all_gather((states[:, -1], products[:, -1]), "seq")
    if BUG == "gradient_of_passed_state_is_lost":
        last, whole = jax.lax.stop_gradient((last, whole))
    start, own = jnp.zeros_like(last[0]), jax.lax.axis_index("seq")
    for device in range(DEVICES - 1):
        if BUG == "states_of_earlier_parts_do_not_decay":
            after = start + last[device]
        else:
            after = whole[device] * start + last[device]
        start = jnp.where(device < own, after, start)
    if BUG == "each_part_starts_from_zeros":
        return states
    return states + products * start[:, None]


def loss_fn(params, tokens, targets):
    x = params["embed"][tokens]
    decay = jax.nn.sigmoid(x @ params["decay"] + 2)
    states = recur(decay, (1 - decay) * (x @ params["input"]))
    x = x + states * jax.nn.silu(x @ params["gate"])
    logits = harness.keep("y_pred", x @ params["head"], P(None, "seq"))
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], 2)
    return losses.sum() / (BATCH * LENGTH)


def device_step(params, velocity, tokens, targets):
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens, targets)
    grads = harness.keep("sums", jax.lax.psum(grads, "seq"))
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.psum(loss, "seq")


def main():
    random = np.random.default_rng(6)
    shapes = dict.fromkeys(("decay", "input", "gate"), (WIDTH, WIDTH))
    shapes |= {"embed": (WORDS, WIDTH), "head": (WIDTH, WORDS)}
    params = {name: np.float32(random.normal(size=shape) / 2) for name, shape in shapes.items()}
    mesh = Mesh(np.array(jax.devices()), ("seq",))
    params = jax.device_put(params, NamedSharding(mesh, P()))
    velocity = jax.tree.map(jnp.zeros_like, params)
    parts = P(None, "seq")
    step = jax.shard_map(
        device_step,
        mesh=mesh,
        in_specs=(P(), P(), parts, parts),
        out_specs=P(),
        check_vma=False,
    )
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            text = random.integers(WORDS, size=(BATCH, LENGTH + 1)).astype(np.int32)
            batch = jax.device_put((text[:, :-1], text[:, 1:]), NamedSharding(mesh, parts))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
