"""Trains LeNet or ResNet-18 on Fashion-MNIST with JAX on several CPU devices.

    python frameworks/jax_lenet.py --mode=pmap --epochs=1

This is the training of "Dive into Deep Learning", section "Training on Multiple GPUs": weights
N(0, 0.01²), plain SGD. With `jit`, arrays are split over a mesh and XLA adds the all-reduce; with
`pmap`, each device runs the step and calls `pmean` explicitly. It needs JAX and NumPy, and the four
files of Fashion-MNIST in `$FASHION_MNIST_DIR`.

With `--start` and `--batches` it repeats the training of another framework, with the same initial
weights and the same examples. `--trace` records the first steps for `main.py verify --traces`. With
`--replay=single.npz`, a recording of the same network by Lockstep, each of these steps starts from
the recorded weights; without `--batches`, it uses the recorded batch.
"""

import argparse
import contextlib
import itertools
import pathlib
import sys
import time
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


def train_steps(
    devices: Devices,
    train_step: Step,
    variables: tuple[Tree, Tree],
    batches: Iterable[Batch],
    print_steps: bool = False,
) -> tuple[tuple[Tree, Tree], float, float]:
    """Trains one step for each batch; returns the variables, the mean loss and the accuracy."""
    losses, accuracies, sizes = [], [], []
    for step, batch in enumerate(batches, 1):
        *variables, loss, accuracy = train_step(*variables, *devices.split(*batch))
        # JAX can deadlock with many queued steps: on CPUs, an all-reduce takes one thread per
        # device, and there may be no more threads.
        jax.block_until_ready(variables)
        losses.append(loss)
        accuracies.append(accuracy)
        sizes.append(len(batch[1]))
        if print_steps:
            print(f"step {step}", flush=True)
    means = [[np.mean(x) for x in jax.device_get(values)] for values in (losses, accuracies)]
    loss, accuracy = (float(np.average(values, weights=sizes)) for values in means)
    return tuple(variables), loss, accuracy


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


def train_epochs(
    devices: Devices,
    train_step: Step,
    variables: tuple[Tree, Tree],
    options: argparse.Namespace,
    data: Data,
) -> tuple[tuple[Tree, Tree], list[dict[str, float]]]:
    """Trains all epochs and prints a line for each; returns the variables and the results."""
    results = []
    for epoch in range(options.epochs):
        begin = time.perf_counter()
        batches = training_files.batches_of(options, data, epoch)
        variables, loss, accuracy = train_steps(devices, train_step, variables, batches)
        middle = time.perf_counter()
        network, averaged = jax_models.NETWORKS[options.model], devices.to_host(*variables)
        test_loss, test_acc = evaluate(network, *averaged, data.test_images, data.test_labels)
        result = {"train_loss": loss, "train_accuracy": accuracy}
        result |= {"test_loss": test_loss, "test_accuracy": test_acc}
        result |= {"epoch_sec": middle - begin, "evaluation_sec": time.perf_counter() - middle}
        results.append(result)
        print(f"epoch {epoch + 1}: test acc {test_acc:.4f}, {middle - begin:.1f} sec", flush=True)
    return variables, results


def recorded(train_step: Step, options: argparse.Namespace, variables: Iterable[str]) -> Any:
    """Returns a context manager that yields the step, recorded if requested."""
    if not options.trace:
        return contextlib.nullcontext(train_step)
    names = {}
    if options.replay:
        names = training_files.names_in_replay(options.replay, "jax", variables)
    return record_jax.record(
        options.trace,
        train_step,
        arguments={"params": 0, "state": 1, "batch": (2, 3)},
        outputs={"params": 0, "state": 1, "loss": 2},
        optimizer={"class": "SGD", "learning_rate": options.learning_rate},
        steps=options.recorded_steps,
        pmap=options.mode == "pmap",
        replay=options.replay,
        permute=options.permute,
        names=names,
    )


def train(options: argparse.Namespace, variables: tuple[Tree, Tree], data: Data) -> None:
    """Trains from these weights and statistics, and writes the requested files."""
    devices, results = Devices(options.mode, options.num_devices), list[dict[str, float]]()
    variables = devices.copy(variables)
    step = partial(
        training_step,
        network=jax_models.NETWORKS[options.model],
        learning_rate=options.learning_rate,
    )
    names = [name for part in variables for name in part]
    with recorded(devices.compile(step), options, names) as train_step:
        if options.num_steps:
            epochs = (training_files.batches_of(options, data, e) for e in range(options.epochs))
            batches = itertools.islice(itertools.chain.from_iterable(epochs), options.num_steps)
            variables, _, _ = train_steps(devices, train_step, variables, batches, print_steps=True)
        else:
            variables, results = train_epochs(devices, train_step, variables, options, data)
    params, state = devices.to_host(*variables)
    if options.weights:
        training_files.write_npz(options.weights, params | state)
    if options.results:
        number = sum(array.size for array in (params | state).values())
        about = {"versions": {"jax": jax.__version__}, "num_parameters": number}
        training_files.write_json(options.results, {**about, "epochs": results})


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
