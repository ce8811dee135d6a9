"""Without check_vma, the gradient of a psum within a layer is another psum.

reference = "jax-ml/jax#17111, jax-ml/jax: docs/notebooks/shard_map.md"
date = "2023-08"
framework = "jax"

[wrong]
"psum in the forward pass as it is" = [
    "repeated_gradient",
    "scaled_gradient",
    "sum_instead_of_mean",
]
"the gradient of the block's input is not summed" = [
    "forgotten_backward_sum",
    "partial_not_reduced",
]
"the bias is added before the sum" = ["repeated_bias", "other_outputs"]
"""

import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import lockstep
from lockstep import record_jax

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
    y = x if BUG == "the gradient of the block's input is not summed" else enter(x)
    y = jax.nn.gelu(y @ params["up"]) @ params["down"]
    if BUG == "the bias is added before the sum":
        return x + leave(y + params["bias"])
    sum_up = leave
    if BUG == "psum in the forward pass as it is":
        sum_up = lambda y: jax.lax.psum(y, "model")  # noqa: E731
    return x + sum_up(y) + params["bias"]


def loss_fn(params, x, y):
    x = block(params["second"], block(params["first"], x @ params["embed"]))
    return jnp.square(record_jax.keep("y_pred", x @ params["head"]) - y).mean()


def device_step(params, velocity, x, y):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    loss = record_jax.keep("loss", loss)
    grads = record_jax.keep("sums", grads, SPECS)
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
    with lockstep.record(
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
