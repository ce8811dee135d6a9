"""Trains LeNet or ResNet-18 on Fashion-MNIST with JAX on several CPU devices.

    python frameworks/jax_lenet.py --mode=pmap --epochs=1

This is the training of "Dive into Deep Learning", section "Training on Multiple GPUs": weights
N(0, 0.01²), plain SGD. With `jit`, arrays are split over a mesh and XLA adds the all-reduce; with
`pmap`, each device runs the step and calls `pmean` explicitly. It needs JAX and NumPy, and the four
files of Fashion-MNIST in `$FASHION_MNIST_DIR`.

With `--start` and `--batches` it repeats the training of another framework, with the same initial
weights and the same examples. `--trace` records the first steps for `python -m lockstep`.
"""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import jax_models
import training_files
from training_files import Data, Step

from lockstep import record_jax

Tree = Any  # Dictionaries of arrays.


def training_step(
    params: Tree,
    state: Tree,
    images: jax.Array,
    labels: jax.Array,
    *,
    network: Callable[..., Any],
    learning_rate: float,
    axis: str | None = None,
) -> tuple[Tree, Tree, jax.Array, jax.Array]:
    """Returns weights and statistics after a step of SGD, loss and accuracy.

    With `jit`, this is the program of all devices, to which XLA adds the all-reduce. With `pmap`,
    it is the program of one device, and `axis` names the devices.
    """

    def loss_fn(params: Tree) -> tuple[jax.Array, tuple[jax.Array, Tree]]:
        logits, new_state = network(params, state, scaled(images), training=True)
        return mean_loss(logits, labels), (logits, new_state)

    (loss, (logits, state)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    if axis:
        grads = record_jax.keep("raw", grads)
        grads = jax.lax.pmean(grads, axis)
    grads = record_jax.keep("sums", grads)
    params = jax.tree.map(lambda p, g: p - learning_rate * g, params, grads)
    return params, state, loss, (logits.argmax(1) == labels).mean()


def scaled(images: jax.Array) -> jax.Array:
    """Returns pixels in [0, 1]; XLA would multiply by 1 / 255, which rounds differently."""
    return jnp.asarray(np.arange(256, dtype=np.float32) / 255)[images]


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the examples."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


class Trainer:
    """Trains on several devices: compiles the step, and keeps their variables.

    Args:
        options: model, number of devices, and the mode: one program of all devices ("jit"), or one
            that each device runs ("pmap").
        params, state: initial weights and statistics.

    Attributes:
        step: the compiled step.
    """

    def __init__(self, options: argparse.Namespace, params: Tree, state: Tree) -> None:
        self.network, self.number = jax_models.NETWORKS[options.model], options.num_devices
        step = partial(training_step, network=self.network, learning_rate=options.learning_rate)
        self.mesh: Any = None
        if options.mode == "jit":
            self.mesh = Mesh(np.array(jax.devices()), ("devices",))
            everywhere = NamedSharding(self.mesh, P())
            self.step = jax.jit(step, donate_argnums=(0, 1), out_shardings=everywhere)
            self.variables = jax.device_put((params, state), everywhere)
        else:
            step = partial(step, axis="devices")
            self.step = jax.pmap(step, axis_name="devices", donate_argnums=(0, 1))
            self.variables = jax.tree.map(lambda a: np.stack([a] * self.number), (params, state))

    def split(self, images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
        """Returns images and labels, with an equal part on each device."""
        batch = images, labels.astype(np.int32)
        if self.mesh:
            return jax.device_put(batch, NamedSharding(self.mesh, P("devices")))
        return jax.tree.map(lambda a: a.reshape(self.number, -1, *a.shape[1:]), batch)

    def train_step(self, images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        """Trains one step; returns the sum of the losses and the number of correct predictions."""
        *variables, loss, accuracy = self.step(*self.variables, *self.split(images, labels))
        # JAX can deadlock with many queued steps: on CPUs, an all-reduce takes one thread per
        # device, and there may be no more threads.
        self.variables = jax.block_until_ready(tuple(variables))
        return len(labels) * float(np.mean(loss)), len(labels) * float(np.mean(accuracy))

    def create_test(self) -> Step:
        """Returns a function that computes a batch on one device, with the current weights."""
        predict, variables = jax.jit(self.network, static_argnames="training"), self.to_host()

        def test(images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
            logits, _ = predict(*variables, scaled(images), training=False)
            loss = float(mean_loss(logits, labels))
            return len(labels) * loss, float((logits.argmax(1) == labels).sum())

        return test

    def to_host(self) -> tuple[Tree, Tree]:
        """Returns the weights, and the mean of the devices' statistics, as NumPy arrays."""
        params, state = jax.device_get(self.variables)
        if self.mesh:
            return params, state  # Copies are equal.
        params = {name: copies[0] for name, copies in params.items()}
        return params, {name: copies.mean(axis=0) for name, copies in state.items()}


def train(options: argparse.Namespace, params: Tree, state: Tree, data: Data) -> None:
    """Trains from these weights and statistics, and writes the requested files."""
    trainer = Trainer(options, params, state)
    recording: Any = contextlib.nullcontext(trainer.step)
    if options.trace:
        recording = record_jax.record(
            options.trace,
            trainer.step,
            arguments={"params": 0, "state": 1, "batch": (2, 3)},
            outputs={"params": 0, "state": 1, "loss": 2},
            optimizer={"class": "SGD", "learning_rate": options.learning_rate},
            steps=options.recorded_steps,
            pmap=options.mode == "pmap",
        )
    with recording as trainer.step:
        epochs = training_files.train(options, data, trainer.train_step, trainer.create_test)
    params, state = trainer.to_host()
    training_files.write_files(options, params | state, {"jax": jax.__version__}, epochs)


def main() -> None:
    """Reads the options and files, and trains."""
    parser = training_files.Parser(__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["jit", "pmap"], default="jit")
    parser.add_argument("--num_devices", type=training_files.at_least_1, default=2)
    options = parser.parse()
    data = training_files.load_data(options)
    for size in training_files.batch_sizes(options, data):
        if size % options.num_devices:
            training_files.fail(
                f"--num_devices={options.num_devices}: a batch of {size} examples cannot be split"
                " evenly; change --global_batch_size, or pass --last_batch=drop"
            )
    params, state = jax_models.create_variables(options.model)
    if options.start:
        start = training_files.load_start(options.start, params | state)
        params, state = ({name: start[name] for name in part} for part in (params, state))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.num_devices)
    train(options, params, state, data)


if __name__ == "__main__":
    main()
