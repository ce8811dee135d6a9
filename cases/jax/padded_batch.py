"""A last batch is padded to a multiple of the devices, and its padding is not masked.

id = "jax/padded_batch"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["jax-ml/jax#3088", "google/flax#2111"]
date = "2020-05"
tags = ["shard_map", "jit"]

[wrong.each_device_divides_by_its_own_number]
title = "each device divides by its own number of rows"
place = { node = "loss", step = 1, ranks = "all", tensors = "all" }

[wrong.mean_is_over_all_rows_with_padding]
title = "the mean is over all rows, with padding"
place = { node = "loss", step = 1, ranks = "all", tensors = "all" }

[wrong.padding_repeats_examples_which_count]
title = "padding repeats examples, which count"
place = { node = "examples", step = 1, ranks = [1], tensors = "all" }
"""

import os
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from cases import harness

BUG = os.environ.get("BUG", "")
DEVICES = int(os.environ.get("DEVICES", 1))
jax.config.update("jax_num_cpu_devices", DEVICES)
ROWS, RATE = 16, 0.3  # Each call has so many rows, so that it is compiled once.


@jax.tree_util.register_dataclass
@dataclass
class Model:
    """A pytree, as a module of Equinox is."""

    table: jax.Array
    weight: jax.Array
    bias: jax.Array

    def __call__(self, words):
        """Returns the logits of one bag of words."""
        return jnp.tanh(self.table[words].mean(0)) @ self.weight + self.bias


def loss_fn(model, words, label, mask):
    logits = harness.keep("y_pred", jax.vmap(model)(words))
    losses = -jnp.take_along_axis(jax.nn.log_softmax(logits), label[:, None], 1)[:, 0]
    if BUG == "each_device_divides_by_its_own_number":
        count = mask.sum() * DEVICES
    elif BUG == "mean_is_over_all_rows_with_padding":
        count = ROWS
    else:
        count = jax.lax.psum(mask.sum(), "data")
    return (losses * mask).sum() / count


def device_step(model, squares, words, label, mask):
    loss, grads = jax.value_and_grad(loss_fn)(model, words, label, mask)
    grads = harness.keep("raw", grads)
    grads = harness.keep("sums", jax.lax.psum(grads, "data"))
    squares = jax.tree.map(lambda s, g: s + g * g, squares, grads)  # Adagrad.
    model = jax.tree.map(lambda p, s, g: p - RATE * g / (jnp.sqrt(s) + 0.05), model, squares, grads)
    return model, squares, jax.lax.psum(loss, "data")


def pad(batch, number):
    """Returns the batch with rows up to `ROWS`, and which of them count."""
    mask = np.float32(np.arange(ROWS) < number)
    if BUG == "padding_repeats_examples_which_count":
        rows = np.arange(ROWS) % number
        return *(a[rows] for a in batch), np.ones_like(mask)
    filled = (np.concatenate([a, np.zeros((ROWS - len(a), *a.shape[1:]), a.dtype)]) for a in batch)
    return *filled, mask


def main():
    random = np.random.default_rng(0)
    model = Model(
        np.float32(random.normal(size=(30, 12))),
        np.float32(random.normal(size=(12, 4)) / 3),
        np.zeros(4, np.float32),
    )
    squares = jax.tree.map(np.zeros_like, model)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    specs = (P(), P(), P("data"), P("data"), P("data"))
    step = jax.shard_map(device_step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    with harness.training(
        jax.jit(step),
        {"class": "Adagrad", "learning_rate": RATE, "epsilon": 0.05},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3, 4)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for number in (ROWS, 11):
            words = random.integers(0, 30, (number, 6)).astype(np.int32)
            batch = pad((words, (words[:, 0] % 4).astype(np.int32)), number)
            model, squares, _ = train_step(model, squares, *batch)


if __name__ == "__main__":
    main()
