"""Options and files of `torch_lenet.py` and `jax_lenet.py`, without a framework.

A training reads initial weights and batches, and writes results and weights. Arrays have Keras'
names and layouts: `conv1/kernel` is (height, width, inputs, outputs), images are NHWC.
"""

import argparse
import dataclasses
import gzip
import json
import os
import pathlib
import sys
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

NUM_CLASSES = 10
LEARNING_RATES = {"lenet": 0.2, "resnet18": 0.1}  # Of "Dive into Deep Learning".
TORCH_NAMES = {
    **{"kernel": "weight", "gamma": "weight", "bias": "bias", "beta": "bias"},
    **{"moving_mean": "running_mean", "moving_variance": "running_var"},
}
Batch = tuple[np.ndarray, np.ndarray]  # Images (n, 28, 28, 1) of bytes, labels (n,).


@dataclasses.dataclass(frozen=True)
class Data:
    """The images of a training, and the order of the examples.

    Attributes:
        images: uint8, (n, 28, 28, 1).
        labels: int64, (n,).
        order: (epochs, examples of an epoch): rows of `images`.
        test_images: uint8, (n, 28, 28, 1).
        test_labels: int64, (n,).
    """

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
        add("--global_batch_size", type=at_least_1, help="default: 256")
        add("--learning_rate", type=float, help="default: 0.2 for lenet, 0.1 for resnet18")
        add("--last_batch", choices=["keep", "drop"], default="keep", help="if it is short")
        add("--start", help="weights to start from, .npz; default: random")
        add("--batches", help="images and their order, .npz; default: Fashion-MNIST, shuffled")
        add("--num_steps", type=at_least_1, help="stop after so many steps, without evaluation")
        add("--results", help="file to write: loss and accuracy of each epoch, .json")
        add("--weights", help="file to write: weights at the end, .npz")
        add("--trace", help="file to write: a recording of the first steps, .npz")
        add("--recorded_steps", type=at_least_1, help="number of steps in the recording")
        add(
            "--replay",
            help="recording whose states are loaded before each recorded step, .npz;"
            " without --batches, its batches are taken, too",
        )
        add("--permute", type=int, help="seed: permute the examples of each recorded batch")

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
        for name in ("replay", "permute"):
            if getattr(options, name) is not None and not options.trace:
                fail(f"--{name}: needs --trace=FILE, the recording to write")
        for name in ("global_batch_size", "num_steps", "results"):
            if options.replay and not options.batches and getattr(options, name):
                fail(f"--{name}: cannot be used with the batches of --replay; pass --batches")
        if options.num_steps and options.results:
            fail("--results: has whole epochs; leave out --num_steps")
        options.global_batch_size = options.global_batch_size or 256
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
    """Loads the images and their order: of `--batches`, of `--replay`, or shuffled Fashion-MNIST.

    Checks the numbers of epochs and steps in `options`; the batches of `--replay` have a fixed
    number and size.
    """
    if options.batches:
        data = _read_batches(options.batches)
    elif options.replay:
        data, options.global_batch_size = _read_recorded_batches(options)
        options.num_steps = options.recorded_steps
    else:
        train, test = _read_fashion_mnist("train"), _read_fashion_mnist("t10k")
        seeds = range(options.epochs)
        order = np.stack([np.random.default_rng(s).permutation(len(train[1])) for s in seeds])
        data = Data(*train, order, *test)
    num_epochs = len(data.order)
    if options.epochs > num_epochs:
        fail(f"--epochs={options.epochs}: {options.batches} has an order for {num_epochs} only")
    available = options.epochs * len([*_batch_rows(options, data, 0)])
    if not available:
        fail(f"--global_batch_size={options.global_batch_size}: an epoch has fewer examples")
    if (options.num_steps or 0) > available:
        fail(f"--num_steps={options.num_steps}: there are {available} steps; raise --epochs")
    if (options.recorded_steps or 0) > (num_steps := options.num_steps or available):
        fail(f"--recorded_steps={options.recorded_steps}: the training has {num_steps} steps")
    recorded = _about(options.replay)["steps"] if options.replay else range(num_steps)
    if missing := [s for s in range(options.recorded_steps or 0) if s not in recorded]:
        fail(f"--replay={options.replay}: has no step {missing[0]}; lower --recorded_steps")
    return data


def batch_sizes(options: argparse.Namespace, data: Data) -> set[int]:
    """Returns the sizes of the global batches, including a short last one."""
    return {len(rows) for rows in _batch_rows(options, data, 0)}


def batches_of(options: argparse.Namespace, data: Data, epoch: int) -> Iterator[Batch]:
    """Yields the global batches of an epoch."""
    for rows in _batch_rows(options, data, epoch):
        yield data.images[rows], data.labels[rows]


def scaled(images: np.ndarray) -> np.ndarray:
    """Returns pixels in [0, 1], float32."""
    return images.astype(np.float32) / np.float32(255)


def load_start(path: str, variables: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Loads the initial weights and statistics.

    Args:
        path: file of `--start`.
        variables: the variables of the model; the file must have their names and shapes.
    """
    start = read_npz("start", path)
    for name in [*variables, *start]:
        if name not in start:
            fail(f"--start={path}: has no {name}")
        if name not in variables:
            fail(f"--start={path}: has {name}, which is not in the model")
        if start[name].shape != variables[name].shape:
            fail(f"--start={path}: {name} is {start[name].shape}, not {variables[name].shape}")
    return {name: start[name].astype(np.float32) for name in variables}


def names_in_replay(path: str, framework: str, variables: Iterable[str]) -> dict[str, str]:
    """Returns the variables' names in the recording `--replay`.

    Args:
        path: the recording.
        framework: "torch" or "jax", the framework of this program.
        variables: Keras names.
    """
    about = _about(path)
    recorded = {variable["name"] for variable in about["variables"]}
    names = [(_name_in(framework, n), _name_in(about["framework"], n)) for n in variables]
    return {own: other for own, other in names if other in recorded}


def read_npz(option: str, path: str, kind: str = "") -> dict[str, np.ndarray]:
    """Reads the arrays of a file whose names contain `kind`; rejects pickled objects."""
    try:
        with np.load(path) as file:
            return {name: file[name] for name in file if kind in name}
    except FileNotFoundError:
        fail(f"--{option}={path}: no such file")
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        fail(f"--{option}={path}: cannot be read as .npz: {error}")


def write_npz(path: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes arrays under a temporary name, then renames the file."""
    with open(f"{path}.tmp", "wb") as file:
        np.savez(file, **arrays)
    os.replace(f"{path}.tmp", path)


def write_json(path: str, content: Mapping[str, Any]) -> None:
    """Writes JSON under a temporary name, then renames the file."""
    pathlib.Path(f"{path}.tmp").write_text(json.dumps(content, indent=1) + "\n")
    os.replace(f"{path}.tmp", path)


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
    data = Data(*(arrays[name] for name in names))
    for images, labels in ((data.images, data.labels), (data.test_images, data.test_labels)):
        found = f"{images.dtype} {images.shape}"
        if found != f"uint8 ({len(images)}, 28, 28, 1)":
            fail(f"--batches={path}: images are {found}, not uint8 (n, 28, 28, 1)")
        if labels.shape != (len(images),) or not _within(labels, NUM_CLASSES):
            fail(f"--batches={path}: labels must be {len(images)} numbers from 0 to 9")
    if data.order.ndim != 2 or not _within(data.order, len(data.images)):
        fail(f"--batches={path}: order must be (epochs, n), with rows of {len(data.images)} images")
    as_int64 = {name: arrays[name].astype(np.int64) for name in ("labels", "test_labels")}
    return dataclasses.replace(data, **as_int64)


def _read_recorded_batches(options: argparse.Namespace) -> tuple[Data, int]:
    """Returns the batches of the recording `--replay`, of all replicas, and their size."""
    path, batches = options.replay, []
    replicas, trace = range(_about(path)["num_replicas"]), read_npz("replay", path, kind="/data/")
    for position in range(1, options.recorded_steps + 1):
        if any(f"{position}/data/{r}/1" not in trace for r in replicas):
            fail(f"--replay={path}: has no images and labels of step {position}; pass --batches")
        parts = [[trace[f"{position}/data/{r}/{i}"] for r in replicas] for i in (0, 1)]
        batches.append([np.concatenate(part) for part in parts])
    size = len(batches[0][1])
    if any(len(labels) != size for _, labels in batches):
        fail(f"--replay={path}: its batches have different sizes; pass --batches")
    images, labels = (np.concatenate(part) for part in zip(*batches, strict=True))
    if images.dtype != np.uint8:
        fail(f"--replay={path}: its images are {images.dtype}, not uint8; pass --batches")
    labels = labels.astype(np.int64).ravel()
    return Data(images, labels, np.arange(len(labels))[None], images[:0], labels[:0]), size


def _about(path: str) -> dict[str, Any]:
    """Returns the description in a recording of one or several processes."""
    first = path if os.path.exists(path) else f"{path.removesuffix('.npz')}.rank0.npz"
    arrays = read_npz("replay", first if os.path.exists(first) else path, kind="about")
    try:
        return json.loads(str(arrays["about"]))
    except (KeyError, ValueError):
        fail(f"--replay={path}: is not a recording")


def _name_in(framework: str, name: str) -> str:
    """Returns the name of a variable in a recording of that framework."""
    layer, kind = name.split("/")
    if framework == "torch":
        return f"{layer}.{TORCH_NAMES[kind]}"
    return f"state/{name}" if framework == "jax" and kind.startswith("moving") else name


def _within(numbers: np.ndarray, end: int) -> bool:
    is_whole = np.issubdtype(numbers.dtype, np.integer)
    return bool(is_whole and ((numbers >= 0) & (numbers < end)).all())


def _read_fashion_mnist(kind: str) -> Batch:
    folder = pathlib.Path(os.environ.get("FASHION_MNIST_DIR", ""))
    paths = [folder / f"{kind}-{part}-ubyte.gz" for part in ("images-idx3", "labels-idx1")]
    for path in paths:
        if not path.is_file():
            fail(f"{path}: no such file; set FASHION_MNIST_DIR to the folder with the four files")
    with gzip.open(paths[0]) as images, gzip.open(paths[1]) as labels:
        pixels = np.frombuffer(images.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
        return pixels, np.frombuffer(labels.read(), np.uint8, offset=8).astype(np.int64)
