"""Data parallelism in JAX with `shard_map`: `pmean` averages the gradients of the devices."""

import functools
import os

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cases import harness

DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
LEARNING_RATE, MOMENTUM, MAX_NORM = 0.1, 0.9, 0.3
GLOBAL_BATCH_SIZE, EXAMPLES = 12, 36


def init_params():
    random = np.random.default_rng(0)

    def layer(size, features):
        kernel = random.normal(size=(size, features)) / np.sqrt(size)
        return {"kernel": np.float32(kernel), "bias": np.zeros(features, np.float32)}

    return {"hidden": layer(5, 8), "middle": layer(8, 8), "output": layer(8, 3)}


def apply(params, x):
    for name in ("hidden", "middle"):
        x = jnp.tanh(x @ params[name]["kernel"] + params[name]["bias"])
    return x @ params["output"]["kernel"] + params["output"]["bias"]


def loss_fn(params, images, labels):
    logits = harness.keep("y_pred", apply(params, images))
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probs, labels[:, None], 1).mean()


def clip_by_global_norm(grads):
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, MAX_NORM / norm), grads)


def make_train_step():
    mesh = Mesh(np.array(jax.devices()), ("data",))

    @jax.jit
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), P("data"), P("data")),
        out_specs=(P(), P(), P()),
        check_vma=False,
    )
    def train_step(params, velocity, images, labels):
        loss, grads = jax.value_and_grad(loss_fn)(params, images, labels)
        loss = harness.keep("loss", loss)
        grads = harness.keep("raw", grads)
        grads = harness.keep("sums", jax.lax.pmean(grads, "data"))
        grads = harness.keep("clipped", clip_by_global_norm(grads))
        velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
        params = jax.tree.map(lambda p, v: p - LEARNING_RATE * v, params, velocity)
        return params, velocity, jax.lax.pmean(loss, "data")

    return train_step


def epochs(number):
    """Yields the batches of so many epochs, each in another order."""
    random = np.random.default_rng(1)
    images = random.normal(size=(EXAMPLES, 5)).astype(np.float32)
    labels = images[:, :3].argmax(1)
    for epoch in range(number):
        order = np.random.default_rng(epoch).permutation(EXAMPLES)
        for start in range(0, EXAMPLES, GLOBAL_BATCH_SIZE):
            chosen = order[start : start + GLOBAL_BATCH_SIZE]
            yield images[chosen], labels[chosen]


def main():
    params = init_params()
    velocity = jax.tree.map(np.zeros_like, params)
    with harness.training(
        make_train_step(),
        {"class": "SGD", "learning_rate": LEARNING_RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for images, labels in epochs(2):
            params, velocity, _ = train_step(params, velocity, images, labels)


if __name__ == "__main__":
    main()
