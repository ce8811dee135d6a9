"""JAX on a mesh of two axes: "data" splits the batch, "model" the weights of each block.

`FORM` is "shard_map", with collectives written by hand as in Megatron, or "jit" with shardings.
"""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from cases import harness

DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
FORM, DTYPE = "shard_map", jnp.float32
LEARNING_RATE, MOMENTUM, FEATURES, HIDDEN, CLASSES, BATCH_SIZE = 0.1, 0.9, 8, 16, 4, 16
BLOCK_SPECS = {
    "scale": P(),
    "up": P(None, "model"),
    "up_bias": P("model"),
    "down": P("model", None),
    "down_bias": P(),
}
SPECS = {"first": BLOCK_SPECS, "second": BLOCK_SPECS, "head": {"kernel": P(), "bias": P()}}
DATA = P("data")


def init_params():
    random = np.random.default_rng(0)

    def matrix(*shape):
        return np.float32(random.normal(size=shape) / np.sqrt(shape[0]))

    def block():
        return {
            "scale": np.ones(FEATURES, np.float32),
            "up": matrix(FEATURES, HIDDEN),
            "up_bias": np.zeros(HIDDEN, np.float32),
            "down": matrix(HIDDEN, FEATURES),
            "down_bias": np.zeros(FEATURES, np.float32),
        }

    head = {"kernel": matrix(FEATURES, CLASSES), "bias": np.zeros(CLASSES, np.float32)}
    return {"first": block(), "second": block(), "head": head}


@jax.custom_vjp
def copy_to_model(x):
    """Returns x; sums its gradient over the devices that share a layer."""
    return x


copy_to_model.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.psum(g, "model"),))


@jax.custom_vjp
def sum_over_model(x):
    """Sums x over the devices that share a layer; returns its gradient as it is."""
    return jax.lax.psum(x, "model")


sum_over_model.defvjp(lambda x: (sum_over_model(x), None), lambda _, g: (g,))


def norm(x):
    x = x - x.mean(-1, keepdims=True)
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def block(name, params, x, enter, leave):
    y = enter(norm(x) * params["scale"])
    y = jax.nn.gelu(y @ params["up"] + params["up_bias"])
    y = harness.module(f"{name}.up", y)
    y = leave(y @ params["down"]) + params["down_bias"]
    return x + harness.module(f"{name}.down", y)


def loss_fn(params, x, labels, enter=lambda x: x, leave=lambda x: x):
    low = jax.tree.map(lambda p: p.astype(DTYPE), params)
    x = x.astype(DTYPE)
    for name in ("first", "second"):
        x = block(name, low[name], x, enter, leave)
    logits = (norm(x) @ low["head"]["kernel"] + low["head"]["bias"]).astype(jnp.float32)
    log_probs = jax.nn.log_softmax(harness.keep("y_pred", logits))
    return -jnp.take_along_axis(log_probs, labels[:, None], 1).mean()


def update(params, velocity, grads):
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - LEARNING_RATE * v, params, velocity), velocity


def step_of_device(params, velocity, x, labels):
    loss = functools.partial(loss_fn, enter=copy_to_model, leave=sum_over_model)
    loss, grads = jax.value_and_grad(loss)(params, x, labels)
    loss = harness.keep("loss", loss)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.pmean(grads, "data"))
    return *update(params, velocity, grads), jax.lax.pmean(loss, "data")


def step_of_all(params, velocity, x, labels):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, labels)
    grads = harness.keep("sums", grads)
    return *update(params, velocity, grads), loss


def make_train_step(mesh):
    if FORM == "jit":
        return jax.jit(step_of_all)
    specs = (SPECS, SPECS, DATA, DATA)
    return jax.jit(
        jax.shard_map(
            step_of_device,
            mesh=mesh,
            in_specs=specs,
            out_specs=(SPECS, SPECS, P()),
            check_vma=False,
        )
    )


def main():
    shape = (2, DEVICES // 2) if DEVICES > 1 else (1, 1)
    mesh = Mesh(np.array(jax.devices()).reshape(shape), ("data", "model"))
    sharding = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS)
    params = jax.device_put(init_params(), sharding)
    velocity = jax.device_put(jax.tree.map(jnp.zeros_like, params), sharding)
    random = np.random.default_rng(1)
    with harness.training(
        make_train_step(mesh),
        {"class": "SGD", "learning_rate": LEARNING_RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(3):
            x = random.normal(size=(BATCH_SIZE, FEATURES)).astype(np.float32)
            labels = x[:, :CLASSES].argmax(1)
            batch = jax.device_put((x, labels), NamedSharding(mesh, DATA))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
