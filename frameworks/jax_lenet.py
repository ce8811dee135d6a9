"""Trains LeNet or ResNet-18 on Fashion-MNIST with JAX on several CPU devices.

    python frameworks/jax_lenet.py --mode=pmap --epochs=1

This is the training of "Dive into Deep Learning", section "Training on Multiple GPUs": weights
N(0, 0.01²), plain SGD. With `jit`, arrays are split over a mesh and XLA adds the all-reduce; with
`pmap`, each device runs the step and calls `pmean` explicitly. It needs JAX and NumPy, and the four
files of Fashion-MNIST in `$FASHION_MNIST_DIR`.

With `--start` and `--batches` it repeats the training of another framework, with the same initial
weights and the same examples. `--trace` records the first steps for `main.py verify --traces`.
"""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Callable, Iterable
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
from training_files import Batch, Data

from lockstep import record_jax

Tree = Any  # Dictionaries of arrays.
Step = Callable[..., tuple[Tree, Tree, Any, Any]]


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


class Devices:
    """The devices of a training: compiles its step, and places arrays on them."""

    def __init__(self, mode: str, number: int) -> None:
        self.mode, self.number = mode, number
        self.mesh = Mesh(np.array(jax.devices()), ("devices",))

    def compile(self, step: Step) -> Step:
        """Returns the step as one program of all devices, or as one that each device runs."""
        if self.mode == "jit":
            everywhere = NamedSharding(self.mesh, P())
            return jax.jit(step, donate_argnums=(0, 1), out_shardings=everywhere)
        return jax.pmap(partial(step, axis="devices"), axis_name="devices", donate_argnums=(0, 1))

    def copy(self, tree: Tree) -> Tree:
        """Copies arrays to each device."""
        if self.mode == "jit":
            return jax.device_put(tree, NamedSharding(self.mesh, P()))
        return jax.tree.map(lambda array: np.stack([array] * self.number), tree)

    def split(self, images: np.ndarray, labels: np.ndarray) -> tuple[Any, Any]:
        """Returns images in [0, 1] and labels, with an equal part on each device."""
        batch = (training_files.scaled(images), labels.astype(np.int32))
        if self.mode == "jit":
            return jax.device_put(batch, NamedSharding(self.mesh, P("devices")))
        return jax.tree.map(lambda a: a.reshape(self.number, -1, *a.shape[1:]), batch)

    def to_host(self, params: Tree, state: Tree) -> tuple[Tree, Tree]:
        """Returns the weights, and the mean of the devices' statistics, as NumPy arrays."""
        params, state = jax.device_get((params, state))
        if self.mode == "jit":
            return params, state  # Copies are equal.
        first: Callable[[Any], Any] = lambda copies: copies[0]  # noqa: E731
        mean: Callable[[Any], Any] = lambda copies: copies.mean(axis=0)  # noqa: E731
        return jax.tree.map(first, params), jax.tree.map(mean, state)


class Trainer:
    """Trains with a compiled step, and keeps the variables of all devices."""

    def __init__(self, devices: Devices, step: Step, variables: tuple[Tree, Tree]) -> None:
        self.devices, self.step, self.variables = devices, step, variables

    def train_steps(self, batches: Iterable[Batch]) -> tuple[float, float]:
        """Trains one step for each batch; returns the mean loss and the accuracy."""
        losses, accuracies, sizes = [], [], []
        for batch in batches:
            *variables, loss, accuracy = self.step(*self.variables, *self.devices.split(*batch))
            # JAX can deadlock with many queued steps: on CPUs, an all-reduce takes one thread per
            # device, and there may be no more threads.
            self.variables = jax.block_until_ready(tuple(variables))
            losses.append(loss)
            accuracies.append(accuracy)
            sizes.append(len(batch[1]))
        means = [[np.mean(x) for x in jax.device_get(values)] for values in (losses, accuracies)]
        loss, accuracy = (float(np.average(values, weights=sizes)) for values in means)
        return loss, accuracy


def evaluate(
    network: Callable[..., Any], params: Tree, state: Tree, images: np.ndarray, labels: np.ndarray
) -> tuple[float, float]:
    """Returns the mean loss and the accuracy, computed on one device."""
    predict = jax.jit(network, static_argnames="training")
    loss = correct = 0.0
    for begin in range(0, len(images), 1000):
        part = slice(begin, begin + 1000)
        logits, _ = predict(params, state, training_files.scaled(images[part]), training=False)
        loss += float(mean_loss(logits, labels[part])) * len(logits)
        correct += float((logits.argmax(1) == labels[part]).sum())
    return loss / len(images), correct / len(images)


def recorded(train_step: Step, options: argparse.Namespace) -> Any:
    """Returns a context manager that yields the step, recorded if requested."""
    if not options.trace:
        return contextlib.nullcontext(train_step)
    return record_jax.record(
        options.trace,
        train_step,
        arguments={"params": 0, "state": 1, "batch": (2, 3)},
        outputs={"params": 0, "state": 1, "loss": 2},
        optimizer={"class": "SGD", "learning_rate": options.learning_rate},
        steps=options.recorded_steps,
        pmap=options.mode == "pmap",
    )


def train(options: argparse.Namespace, variables: tuple[Tree, Tree], data: Data) -> None:
    """Trains from these weights and statistics, and writes the requested files."""
    devices, network = (
        Devices(options.mode, options.num_devices),
        jax_models.NETWORKS[options.model],
    )
    step = partial(training_step, network=network, learning_rate=options.learning_rate)
    with recorded(devices.compile(step), options) as train_step:
        trainer = Trainer(devices, train_step, devices.copy(variables))

        def test() -> tuple[float, float]:
            averaged = devices.to_host(*trainer.variables)
            return evaluate(network, *averaged, data.test_images, data.test_labels)

        epochs = training_files.train(options, data, trainer.train_steps, test)
    params, state = devices.to_host(*trainer.variables)
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
    train(options, (params, state), data)


if __name__ == "__main__":
    main()
