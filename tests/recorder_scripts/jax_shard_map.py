"""Trains a small CNN on Fashion-MNIST with shard_map: NUM_DEVICES=2 python jax_shard_map.py"""

import gzip
import os
from functools import partial

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

BATCH_SIZE = 64  # Of all devices together.
NUM_EPOCHS = 2
NUM_EXAMPLES = int(os.environ.get("NUM_EXAMPLES", 60000))
NUM_DEVICES = int(os.environ.get("NUM_DEVICES", 2))


def load_data(folder):
    with gzip.open(os.path.join(folder, "train-images-idx3-ubyte.gz")) as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
    with gzip.open(os.path.join(folder, "train-labels-idx1-ubyte.gz")) as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return np.float32(images[:NUM_EXAMPLES] / 255), np.int32(labels[:NUM_EXAMPLES])


def batches(images, labels, epoch):
    """Shuffles, and fills the last batch with examples of weight 0."""
    order = np.random.default_rng(epoch).permutation(len(images))
    for start in range(0, len(order), BATCH_SIZE):
        rows = np.resize(order[start : start + BATCH_SIZE], BATCH_SIZE)
        yield images[rows], labels[rows], np.float32(np.arange(BATCH_SIZE) < len(order) - start)


def init(**shapes):
    normal = jax.nn.initializers.he_normal()
    keys = jax.random.split(jax.random.key(0), len(shapes))
    kernels = {name: normal(key, shapes[name]) for name, key in zip(shapes, keys, strict=True)}
    return {n: {"kernel": k, "bias": jnp.zeros(k.shape[-1])} for n, k in kernels.items()}


def forward(params, x):
    for layer in (params["conv1"], params["conv2"]):
        axes = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(x, layer["kernel"], (2, 2), "SAME", dimension_numbers=axes)
        x = jax.nn.relu(x + layer["bias"])
    return x.reshape(len(x), -1) @ params["logits"]["kernel"] + params["logits"]["bias"]


def loss_fn(params, x, y, weights):
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(forward(params, x)), y[:, None], axis=1)
    return -(log_probs[:, 0] * weights).sum() / jax.lax.psum(weights.sum(), "data")


@partial(jax.jit, donate_argnums=(0, 1))
@partial(
    jax.shard_map,
    mesh=jax.sharding.Mesh(jax.devices()[:NUM_DEVICES], ("data",)),
    in_specs=(P(), P(), P("data"), P("data"), P("data")),
    out_specs=(P(), P(), P()),
    check_vma=False,
)
def train_step(params, velocity, x, y, weights):
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y, weights)
    grads = jax.lax.psum(grads, "data")
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - 0.02 * v, params, velocity)
    return params, velocity, jax.lax.psum(loss, "data")


def train(train_step):
    images, labels = load_data(os.environ["FASHION_MNIST_DIR"])
    params = init(conv1=(5, 5, 1, 8), conv2=(3, 3, 8, 16), logits=(784, 10))
    velocity = jax.tree.map(jnp.zeros_like, params)
    for epoch in range(NUM_EPOCHS):
        for batch in batches(images, labels, epoch):
            params, velocity, loss = train_step(params, velocity, *batch)
        print(f"epoch {epoch + 1}: loss {loss:.4f}")


if __name__ == "__main__":
    train(train_step)
