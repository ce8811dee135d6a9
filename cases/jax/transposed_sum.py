"""Without check_vma, the gradient of a psum within a layer is another psum.

id = "jax/transposed_sum"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["jax-ml/jax#17111", "jax-ml/jax: docs/notebooks/shard_map.md"]
date = "2023-08"
tags = ["shard_map", "jit", "sgd"]

[wrong.psum_in_forward_pass_as_it_is]
title = "psum in the forward pass as it is"
place = { node = "gradient", step = 0, ranks = "all", tensors = [
    "embed",
    "first/*",
    "second/up",
    "second/down",
] }

[wrong.gradient_of_block_input_is_not_summed]
title = "the gradient of the block's input is not summed"
place = { node = "gradient", step = 0, ranks = "all", tensors = ["embed", "first/*"] }

[wrong.bias_is_added_before_sum]
title = "the bias is added before the sum"
place = { node = "outputs", step = 0, ranks = "all", tensors = ["first", "second"] }
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
WIDTH, HIDDEN, RATE, MOMENTUM = 8, 16, 0.1, 0.9
BLOCK = {"up": P(None, "model"), "down": P("model"), "bias": P()}
SPECS = {"embed": P(), "first": BLOCK, "second": BLOCK, "head": P()}


@jax.custom_vjp
def enter(x):
    """Returns x; its gradient is the sum over the devices that use it."""
    return x


enter.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "model"),))


@jax.custom_vjp
def leave(x):
    """Returns the sum over the devices; passes its gradient on as it is."""
    return jax.lax.psum(x, "model")


leave.defvjp(lambda x: (leave(x), None), lambda _, g: (g,))


def block(params, x):
    y = x if BUG == "gradient_of_block_input_is_not_summed" else enter(x)
    y = jax.nn.gelu(y @ params["up"]) @ params["down"]
    if BUG == "bias_is_added_before_sum":
        return x + leave(y + params["bias"])
    sum_up = leave
    if BUG == "psum_in_forward_pass_as_it_is":
        sum_up = lambda y: jax.lax.psum(y, "model")  # noqa: E731
    return x + sum_up(y) + params["bias"]


def loss_fn(params, x, y):
    x = block(params["second"], block(params["first"], x @ params["embed"]))
    return jnp.square(harness.keep("y_pred", x @ params["head"]) - y).mean()


def device_step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    loss = harness.keep("loss", loss)
    grads = harness.keep("sums", grads, SPECS)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - RATE * v, params, velocity), velocity, loss


def main():
    random = np.random.default_rng(0)

    def matrix(*shape):
        return np.float32(random.normal(size=shape) / np.sqrt(shape[0]))

    def new_block():
        bias = np.float32(random.normal(size=WIDTH) / 2)
        return {"up": matrix(WIDTH, HIDDEN), "down": matrix(HIDDEN, WIDTH), "bias": bias}

    params = {"embed": matrix(5, WIDTH), "first": new_block(), "second": new_block()}
    params["head"] = matrix(WIDTH, 2)
    mesh = Mesh(np.array(jax.devices()), ("model",))
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    params = jax.device_put(params, places)
    velocity = jax.device_put(jax.tree.map(jnp.zeros_like, params), places)
    step = jax.shard_map(
        device_step,
        mesh=mesh,
        in_specs=(SPECS, SPECS, P(), P()),
        out_specs=(SPECS, SPECS, P()),
        check_vma=False,
    )
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            x = random.normal(size=(12, 5)).astype(np.float32)
            batch = jax.device_put((x, np.sin(x[:, :2])), NamedSharding(mesh, P()))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
