"""Options, files and epochs of `torch_lenet.py` and `jax_lenet.py`, without a framework.

A training reads initial weights and batches, and writes results and weights. Arrays have Keras'
names and layouts: `conv1/kernel` is (height, width, inputs, outputs), images are NHWC.
"""

import argparse
import dataclasses
import gzip
import itertools
import json
import os
import pathlib
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NoReturn

import numpy as np

LEARNING_RATES = {"lenet": 0.2, "resnet18": 0.1}  # Of "Dive into Deep Learning".
Batch = tuple[np.ndarray, np.ndarray]  # Images (n, 28, 28, 1) of bytes, labels (n,).
# Computes a global batch; returns the sum of the losses and the number of correct predictions.
Step = Callable[[np.ndarray, np.ndarray], tuple[float, float]]


@dataclasses.dataclass(frozen=True)
class Data:
    """Images, uint8 (n, 28, 28, 1), labels, and for each epoch the order of its examples."""

    images: np.ndarray
    labels: np.ndarray
    order: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def fail(message: str) -> NoReturn:
    """Exits with code 2 and an error message of one line."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


class Parser(argparse.ArgumentParser):
    """Parses the options of both programs; reports an error in one line."""

    def __init__(self, description: str) -> None:
        super().__init__(description=description, allow_abbrev=False)
        add = self.add_argument
        add("--model", choices=[*LEARNING_RATES], default="lenet")
        add("--epochs", type=at_least_1, default=1)
        add("--global_batch_size", type=at_least_1, default=256)
        add("--learning_rate", type=float, help="default: 0.2 for lenet, 0.1 for resnet18")
        add("--last_batch", choices=["keep", "drop"], default="keep", help="if it is short")
        add("--start", help="weights to start from, .npz; default: random")
        add("--batches", help="images and their order, .npz; default: Fashion-MNIST, shuffled")
        add("--num_steps", type=at_least_1, help="stop after so many steps, without evaluation")
        add("--results", help="file to write: loss and accuracy of each epoch, .json")
        add("--weights", help="file to write: weights at the end, .npz")
        add("--trace", help="file to write: a recording of the first steps, .npz")
        add("--recorded_steps", type=at_least_1, help="number of steps in the recording")

    def error(self, message: str) -> NoReturn:
        """Ends the program."""
        fail(message)

    def parse(self) -> argparse.Namespace:
        """Returns the options of the command line, after checking combinations."""
        options = self.parse_args()
        if options.learning_rate is None:
            options.learning_rate = LEARNING_RATES[options.model]
        if bool(options.trace) != bool(options.recorded_steps):
            fail("--trace and --recorded_steps: one is missing; pass both")
        if options.num_steps and options.results:
            fail("--results: has whole epochs; leave out --num_steps")
        for name, ending in (("trace", ".npz"), ("weights", ".npz"), ("results", ".json")):
            path = getattr(options, name)
            if path and not (path.endswith(ending) and pathlib.Path(path).parent.is_dir()):
                fail(f"--{name}={path}: must be a {ending} file in a folder that exists")
        return options


def at_least_1(text: str) -> int:
    """Parses an integer of at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1, got {text}")
    return int(text)


def load_data(options: argparse.Namespace) -> Data:
    """Loads the images and their order, of `--batches` or shuffled Fashion-MNIST.

    Checks the numbers of epochs and steps in `options`.
    """
    if options.batches:
        data = _read_batches(options.batches)
    else:
        train, test = read_fashion_mnist(os.environ.get("FASHION_MNIST_DIR", ""))
        seeds = range(options.epochs)
        order = np.stack([np.random.default_rng(s).permutation(len(train[1])) for s in seeds])
        data = Data(*train, order, *test)
    if options.epochs > len(data.order):
        fail(f"--epochs={options.epochs}: {options.batches} has an order for {len(data.order)}")
    available = options.epochs * len([*_batch_rows(options, data, 0)])
    for name in ("num_steps", "recorded_steps"):
        if (wanted := getattr(options, name) or 1) > available:
            fail(f"--{name}={wanted}: there are {available} steps; raise --epochs")
        available = options.num_steps or available
    return data


def batch_sizes(options: argparse.Namespace, data: Data) -> set[int]:
    """Returns the sizes of the global batches, including a short last one."""
    return {len(rows) for rows in _batch_rows(options, data, 0)}


def batches_of(options: argparse.Namespace, data: Data, epoch: int) -> Iterator[Batch]:
    """Yields the global batches of an epoch."""
    for rows in _batch_rows(options, data, epoch):
        yield data.images[rows], data.labels[rows]


def load_start(path: str, variables: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Loads the initial weights and statistics, which must have the model's names and shapes."""
    start = read_npz("start", path)
    for name in {**variables, **start}:
        found, needed = (np.shape(arrays.get(name)) for arrays in (start, variables))
        if name not in start or name not in variables or found != needed:
            fail(f"--start={path}: {name} of shape {found} is not the model's {needed}")
    return {name: start[name].astype(np.float32) for name in variables}


def read_npz(option: str, path: str) -> dict[str, np.ndarray]:
    """Reads the arrays of a file; rejects pickled objects."""
    try:
        with np.load(path) as file:
            return dict(file)
    except FileNotFoundError:
        fail(f"--{option}={path}: no such file")
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        fail(f"--{option}={path}: cannot be read as .npz: {error}")


def train(
    options: argparse.Namespace,
    data: Data,
    train_step: Step,
    create_test: Callable[[], Step],
    add_processes: Callable[[np.ndarray], np.ndarray] = lambda sums: sums,
    say: Callable[[str], object] = lambda line: print(line, flush=True),
) -> list[dict[str, float]]:
    """Trains all epochs, or `--num_steps` steps without evaluation; returns each epoch's results.

    Args:
        options: options of the program.
        data: images and their order.
        train_step: trains a step on a global batch.
        create_test: returns a function that computes a batch with the weights of the moment.
        add_processes: adds the sums of all processes.
        say: prints a line for each epoch or step.
    """
    if options.num_steps:
        epochs = (batches_of(options, data, epoch) for epoch in range(options.epochs))
        batches = itertools.islice(itertools.chain.from_iterable(epochs), options.num_steps)
        for number, batch in enumerate(batches, 1):
            train_step(*batch)
            say(f"step {number}")
        return []

    def means(step: Step, batches: Iterable[Batch]) -> tuple[float, float]:
        sums, num_examples = np.zeros(2), 0
        for images, labels in batches:
            sums += step(images, labels)
            num_examples += len(labels)
        loss, accuracy = (add_processes(sums) / num_examples).tolist()
        return loss, accuracy

    parts = [slice(begin, begin + 1000) for begin in range(0, len(data.test_images), 1000)]
    test_batches = [(data.test_images[part], data.test_labels[part]) for part in parts]
    results = []
    for epoch in range(options.epochs):
        begin = time.perf_counter()
        train_loss, train_accuracy = means(train_step, batches_of(options, data, epoch))
        middle = time.perf_counter()
        test_loss, test_accuracy = means(create_test(), test_batches)
        result = {"train_loss": train_loss, "train_accuracy": train_accuracy}
        result |= {"test_loss": test_loss, "test_accuracy": test_accuracy}
        result |= {"epoch_sec": middle - begin, "evaluation_sec": time.perf_counter() - middle}
        results.append(result)
        say(f"epoch {epoch + 1}: test acc {test_accuracy:.4f}, {middle - begin:.1f} sec")
    return results


def write_files(
    options: argparse.Namespace,
    weights: Mapping[str, np.ndarray],
    versions: Mapping[str, str],
    epochs: list[dict[str, float]],
) -> None:
    """Writes the files that were asked for."""
    if options.weights:
        np.savez(options.weights, **weights)
    if options.results:
        number = sum(array.size for array in weights.values())
        content = {"versions": versions, "num_parameters": number, "epochs": epochs}
        pathlib.Path(options.results).write_text(json.dumps(content, indent=1) + "\n")


def _batch_rows(options: argparse.Namespace, data: Data, epoch: int) -> Iterator[np.ndarray]:
    size, order = options.global_batch_size, data.order[epoch]
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        if len(rows) == size or options.last_batch == "keep":
            yield rows


def _read_batches(path: str) -> Data:
    arrays = read_npz("batches", path)
    names = [field.name for field in dataclasses.fields(Data)]
    if missing := [name for name in names if name not in arrays]:
        fail(f"--batches={path}: has no {missing[0]}")
    for name in ("images", "test_images"):
        found = f"{arrays[name].dtype} {arrays[name].shape}"
        if found != f"uint8 ({len(arrays[name])}, 28, 28, 1)":
            fail(f"--batches={path}: {name} are {found}, not uint8 (n, 28, 28, 1)")
    for name, end in (("labels", 10), ("test_labels", 10), ("order", len(arrays["images"]))):
        if not ((arrays[name] >= 0) & (arrays[name] < end)).all():
            fail(f"--batches={path}: {name} must be from 0 to {end - 1}")
        arrays[name] = arrays[name].astype(np.int64)
    return Data(*(arrays[name] for name in names))


def read_fashion_mnist(folder: str) -> tuple[Batch, Batch]:
    """Returns the training and the test images of the four files in a folder."""
    batches = []
    for kind in ("train", "t10k"):
        arrays = []
        for part, header in (("images-idx3", 16), ("labels-idx1", 8)):
            path = pathlib.Path(folder, f"{kind}-{part}-ubyte.gz")
            if not path.is_file():
                fail(f"{path}: no such file; set FASHION_MNIST_DIR to the folder of the four files")
            content = gzip.decompress(path.read_bytes())
            arrays.append(np.frombuffer(content, np.uint8, offset=header))
        images, labels = arrays
        batches.append((images.reshape(-1, 28, 28, 1), labels.astype(np.int64)))
    return batches[0], batches[1]
