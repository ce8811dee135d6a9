"""Fields are split by rows, and their Fourier transform needs them split by columns for a while.

id = "parallel/transposed_spectrum"
framework = "jax"
processes = 2
steps = 2
mode = "pair"
references = ["DifferentiableUniverseInitiative/jaxDecomp#11", "flatironinstitute/jax-finufft#226"]
date = "2024-04"
tags = ["shard_map", "jit", "sgd"]

[wrong.spectrum_is_weighted_as_if_it_was_transposed]
title = "the spectrum is weighted as if it was transposed"
place = { node = "outputs", step = 0, ranks = "all", tensors = "all" }

[wrong.gradients_of_shared_weights]
title = "gradients of shared weights are those of the own rows"
place = { node = "sum", step = 0, ranks = "all", tensors = ["lift", "mix", "head"] }
"""

import functools
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
SIZE, WIDTH, BATCH, RATE, MOMENTUM = 8, 4, 6, 0.5, 0.9
ROWS = P(None, "rows")


def init():
    random = np.random.default_rng(14)
    spectrum = SIZE, SIZE, WIDTH
    shapes = {"lift": (1, WIDTH), "mix": (WIDTH, WIDTH), "head": (WIDTH, 1)}
    shapes |= {"real": spectrum, "imaginary": spectrum}
    return {name: np.float32(random.normal(size=shape) / 2) for name, shape in shapes.items()}


def exchange(x, split, concat):
    return jax.lax.all_to_all(x, "rows", split, concat, tiled=True)


def own_weights(params):
    """Returns the weights of the spectrum's columns that this device has."""
    weights = params["real"] + 1j * params["imaginary"]
    if BUG == "spectrum_is_weighted_as_if_it_was_transposed":
        weights = weights.swapaxes(0, 1)
    number = SIZE // DEVICES
    first = number * jax.lax.axis_index("rows")
    return jax.lax.dynamic_slice_in_dim(weights, first, number, 1)


def fourier_layer(params, x):
    """Takes and returns (batch, own rows, columns, width)."""
    spectrum = exchange(jnp.fft.fft(x, axis=2), 2, 1)  # All rows, own columns.
    spectrum = jnp.fft.fft(spectrum, axis=1) * own_weights(params)
    y = exchange(jnp.fft.ifft(spectrum, axis=1), 1, 2)
    return jnp.fft.ifft(y, axis=2).real + x @ params["mix"]


def loss_fn(params, fields, after):
    """Returns the own part of the loss."""
    x = fields[..., None] @ params["lift"]
    x = x + jnp.tanh(fourier_layer(params, x))
    outputs = harness.keep("y_pred", (x @ params["head"])[..., 0], ROWS)
    return jnp.abs(outputs - after).sum() / (BATCH * SIZE * SIZE)


def device_step(params, velocity, fields, after):
    loss, grads = jax.value_and_grad(loss_fn)(params, fields, after)
    reduced = jax.lax.psum(grads, "rows")
    if BUG == "gradients_of_shared_weights":
        reduced |= {name: grads[name] for name in ("lift", "mix", "head")}
    grads = harness.keep("sums", reduced)
    velocity = jax.tree.map(lambda v, g: MOMENTUM * v + g, velocity, grads)
    params = jax.tree.map(lambda p, v: p - RATE * v, params, velocity)
    return params, velocity, jax.lax.psum(loss, "rows")


def main():
    mesh = Mesh(np.array(jax.devices()), ("rows",))
    params = jax.device_put(init(), NamedSharding(mesh, P()))
    velocity = jax.tree.map(jnp.zeros_like, params)
    step = functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P(), P(), ROWS, ROWS),
        out_specs=P(),
        check_vma=False,
    )(device_step)
    random = np.random.default_rng(15)
    with harness.training(
        jax.jit(step),
        {"class": "SGD", "learning_rate": RATE, "momentum": MOMENTUM},
        arguments={"params": 0, "opt_state": 1, "batch": (2, 3)},
        outputs={"params": 0, "opt_state": 1, "loss": 2},
    ) as train_step:
        for _ in range(2):
            fields = np.float32(random.normal(size=(BATCH, SIZE, SIZE)))
            after = np.roll(fields, 1, 1) + 0.5 * np.roll(fields, 2, 2)
            batch = jax.device_put((fields, after), NamedSharding(mesh, ROWS))
            params, velocity, _ = train_step(params, velocity, *batch)


if __name__ == "__main__":
    main()
