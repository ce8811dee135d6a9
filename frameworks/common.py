"""Options, data and epochs of `torch_lenet.py`, `jax_lenet.py` and `keras_lenet.py`."""

import argparse
import gzip
import itertools
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator

import numpy as np

LEARNING_RATES = {"lenet": 0.2, "resnet18": 0.1}  # Of "Dive into Deep Learning".
Batch = tuple[np.ndarray, np.ndarray]  # Images (n, 28, 28, 1) of bytes, labels (n,).
# Computes a global batch; returns the sum of the losses and the number of correct predictions.
Step = Callable[[np.ndarray, np.ndarray], tuple[float, float]]


def create_parser(description: str) -> argparse.ArgumentParser:
    """Returns a parser with the options of all programs."""
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument("--model", choices=LEARNING_RATES, default="lenet")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--num_steps", type=int, help="stop after so many steps")
    parser.add_argument("--global_batch_size", type=int, default=256)
    return parser


def read_fashion_mnist(folder: str) -> tuple[Batch, Batch]:
    """Returns the training and the test images of the four files in a folder."""
    batches = []
    for kind in ("train", "t10k"):
        arrays = []
        for part, header in (("images-idx3", 16), ("labels-idx1", 8)):
            path = pathlib.Path(folder, f"{kind}-{part}-ubyte.gz")
            if not path.is_file():
                sys.exit(
                    f"error: {path} does not exist; set FASHION_MNIST_DIR to the folder of the four"
                    " files"
                )
            content = gzip.decompress(path.read_bytes())
            arrays.append(np.frombuffer(content, np.uint8, offset=header))
        images, labels = arrays
        batches.append((images.reshape(-1, 28, 28, 1), labels.astype(np.int64)))
    return batches[0], batches[1]


def batches_of(options: argparse.Namespace, data: Batch, epoch: int, num: int) -> Iterator[Batch]:
    """Yields the global batches of an epoch, in an order that depends on the epoch alone.

    Args:
        options: options of the program.
        data: all images and labels.
        epoch: number of the epoch, from 0.
        num: number of devices or processes; a last batch without equal parts is left out.
    """
    images, labels = data
    order, size = np.random.default_rng(epoch).permutation(len(labels)), options.global_batch_size
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        if len(rows) % num == 0:
            yield images[rows], labels[rows]


def train(
    options: argparse.Namespace,
    num: int,
    train_step: Step,
    test: Step,
    add_processes: Callable[[np.ndarray], np.ndarray] = lambda sums: sums,
    is_first: bool = True,
) -> None:
    """Trains, and prints the test accuracy after each epoch, but not after `--num_steps` steps.

    Args:
        options: options of the program.
        num: number of devices or processes.
        train_step: trains a step on a global batch.
        test: computes a batch with the present weights.
        add_processes: adds the sums of all processes.
        is_first: whether this process prints.
    """
    data, test_data = read_fashion_mnist(os.environ.get("FASHION_MNIST_DIR", ""))
    if options.num_steps:
        epochs = (batches_of(options, data, epoch, num) for epoch in range(options.epochs))
        batches = itertools.chain.from_iterable(epochs)
        for images, labels in itertools.islice(batches, options.num_steps):
            train_step(images, labels)
        return
    for epoch in range(options.epochs):
        begin = time.perf_counter()
        for images, labels in batches_of(options, data, epoch, num):
            train_step(images, labels)
        sec = time.perf_counter() - begin
        sums = np.zeros(2)
        for start in range(0, len(test_data[1]), 1000):
            sums += test(*(array[start : start + 1000] for array in test_data))
        accuracy = add_processes(sums)[1] / len(test_data[1])
        if is_first:
            print(f"epoch {epoch + 1}: test acc {accuracy:.4f}, {sec:.1f} sec", flush=True)
