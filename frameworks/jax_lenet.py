"""Trains LeNet or ResNet-18 on Fashion-MNIST with JAX on several CPU devices.

    python frameworks/jax_lenet.py --mode=pmap --num_devices=2 --epochs=1

This is the training of "Dive into Deep Learning", section "Training on Multiple GPUs": weights
N(0, 0.01²), plain SGD. With `jit`, arrays are split over a mesh and XLA adds the all-reduce; with
`pmap`, each device runs the step and calls `pmean` explicitly. It needs JAX and NumPy, and the four
files of Fashion-MNIST in `$FASHION_MNIST_DIR`. `docs/frameworks.md` has the command that compares
it with the same training in other frameworks.
"""

import argparse
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
import common
import jax_models

import lockstep
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
        logits, new_state = network(params, state, images, training=True)
        return mean_loss(logits, labels), (logits, new_state)

    (loss, (logits, state)), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
    if axis:
        grads = record_jax.keep("raw", grads)
        grads = jax.lax.pmean(grads, axis)
    grads = record_jax.keep("sums", grads)
    params = jax.tree.map(lambda p, g: p - learning_rate * g, params, grads)
    return params, state, loss, (logits.argmax(1) == labels).mean()


def mean_loss(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the examples."""
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1).mean()


class Trainer:
    """Trains on several devices: compiles the step, and keeps their variables.

    Args:
        options: model, number of devices, and the mode: one program of all devices ("jit"), or one
            that each device runs ("pmap").

    Attributes:
        step: the compiled step.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.network, self.number = jax_models.NETWORKS[options.model], options.num_devices
        learning_rate = common.LEARNING_RATES[options.model]
        step = partial(training_step, network=self.network, learning_rate=learning_rate)
        variables, self.mesh = jax_models.create_variables(options.model), None
        if options.mode == "jit":
            self.mesh = Mesh(np.array(jax.devices()), ("devices",))
            everywhere = NamedSharding(self.mesh, P())
            self.step = jax.jit(step, donate_argnums=(0, 1), out_shardings=everywhere)
            self.variables = jax.device_put(variables, everywhere)
        else:
            step = partial(step, axis="devices")
            self.step = jax.pmap(step, axis_name="devices", donate_argnums=(0, 1))
            self.variables = jax.tree.map(lambda a: np.stack([a] * self.number), variables)
        self.predict = jax.jit(self.network, static_argnames="training")

    def split(self, images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
        """Returns images in [0, 1] and labels, with an equal part on each device."""
        batch = images / np.float32(255), labels.astype(np.int32)
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

    def test(self, images: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        """Computes a batch on one device, with the mean of the devices' statistics."""
        params, state = jax.device_get(self.variables)
        if not self.mesh:
            params = {name: copies[0] for name, copies in params.items()}
            state = {name: copies.mean(axis=0) for name, copies in state.items()}
        logits = self.predict(params, state, images / np.float32(255), training=False)[0]
        return len(labels) * float(mean_loss(logits, labels)), float(
            (logits.argmax(1) == labels).sum()
        )


def main() -> None:
    """Reads the options, and trains."""
    parser = common.create_parser(__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["jit", "pmap"], default="jit")
    parser.add_argument("--num_devices", type=int, default=1)
    options = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", options.num_devices)
    trainer = Trainer(options)
    optimizer = {"class": "SGD", "learning_rate": common.LEARNING_RATES[options.model]}
    with lockstep.record(
        trainer.step,
        optimizer,
        arguments={"params": 0, "state": 1, "batch": (2, 3)},
        outputs={"params": 0, "state": 1, "loss": 2},
        pmap=options.mode == "pmap",
    ) as trainer.step:
        common.train(options, options.num_devices, trainer.train_step, trainer.test)


if __name__ == "__main__":
    main()
