"""Trains LeNet on Fashion-MNIST with JAX on several CPU devices, with `jit` or `pmap`.

    python frameworks/jax_lenet.py --mode=pmap --epochs=1

It is the training of "Dive into Deep Learning", section "Training on Multiple GPUs": weights
N(0, 0.01²), plain SGD. With `jit`, arrays are split over a mesh and XLA adds the all-reduce; with
`pmap`, each device runs the step and `pmean` is written out. It needs JAX and NumPy, and the four
files of Fashion-MNIST in `$FASHION_MNIST_DIR`.

With `--replay=single.npz`, a recording of the same network by Lockstep, it trains the recorded
steps instead: each starts from the recorded weights, with the recorded batch, and `--trace` is
written for `main.py verify --traces=single.npz,jax.npz`.
"""

import argparse
import contextlib
import gzip
import os
import pathlib
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

SHAPES = {
    **{"conv1": (3, 3, 1, 20), "conv2": (5, 5, 20, 50)},
    **{"hidden": (800, 128), "logits": (128, 10)},
}


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["jit", "pmap"], default="jit")
    parser.add_argument("--num_devices", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--global_batch_size", type=int, default=256)
    parser.add_argument("--learning_rate", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=20, help="to record, from the first one on")
    parser.add_argument("--trace", help="file to write: a recording of the steps")
    parser.add_argument("--replay", help="recording whose states and batches are trained")
    parser.add_argument("--permute", type=int, help="seed: permute the examples of each batch")
    options = parser.parse_args()
    if options.replay and not options.trace:
        parser.error("--replay needs --trace=FILE, the recording to write")
    return options


OPTIONS = parse_arguments()
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={OPTIONS.num_devices}"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "recorders"))

import jax  # noqa: E402 (The number of devices is fixed when JAX starts.)
import jax.numpy as jnp  # noqa: E402
import lockstep_jax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

Tree = Any
Batch = tuple[np.ndarray, np.ndarray]
Step = Callable[..., tuple[Tree, Any]]


def load_images(kind: str) -> tuple[np.ndarray, np.ndarray]:
    """Loads images `(n, 28, 28, 1)` in [0, 1] and labels `(n,)` of "train" or "t10k"."""
    folder = pathlib.Path(os.environ["FASHION_MNIST_DIR"])
    with gzip.open(folder / f"{kind}-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
    with gzip.open(folder / f"{kind}-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return images.astype(np.float32) / np.float32(255), labels.astype(np.int32)


def initial_weights() -> Tree:
    """Returns the parameters of all layers."""
    generator = np.random.default_rng(0)
    return {
        name: {
            "kernel": generator.normal(size=shape, scale=0.01).astype(np.float32),
            "bias": np.zeros(shape[-1], np.float32),
        }
        for name, shape in SHAPES.items()
    }


def epoch_of(images: np.ndarray, labels: np.ndarray, seed: int) -> Iterator[Batch]:
    """Yields the global batches of an epoch, in an order that follows from the seed."""
    order = np.random.default_rng(seed).permutation(len(images))
    for start in range(0, len(order), OPTIONS.global_batch_size):
        rows = order[start : start + OPTIONS.global_batch_size]
        yield images[rows], labels[rows]


def recorded_batches() -> Iterator[Batch]:
    """Yields the batches of a recording with images NHWC of bytes and labels, of all replicas."""
    with np.load(OPTIONS.replay) as trace:
        for position in range(1, OPTIONS.steps + 1):
            replicas = sum(f"{position}/data/{r}/0" in trace for r in range(64))
            images, labels = (
                np.concatenate([trace[f"{position}/data/{r}/{i}"] for r in range(replicas)])
                for i in (0, 1)
            )
            yield images.astype(np.float32) / np.float32(255), labels.astype(np.int32).ravel()


def lenet(params: Tree, x: jax.Array) -> jax.Array:
    """Returns the logits of images (n, 28, 28, 1): the LeNet of `models/lenet.py`."""
    for name in ("conv1", "conv2"):
        axes = ("NHWC", "HWIO", "NHWC")
        kernel, bias = params[name]["kernel"], params[name]["bias"]
        x = jax.lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=axes)
        window = (1, 2, 2, 1)
        x = jax.lax.reduce_window(jax.nn.relu(x + bias), 0.0, jax.lax.add, window, window, "VALID")
        x = x / 4
    x = x.reshape(len(x), -1)
    x = jax.nn.relu(x @ params["hidden"]["kernel"] + params["hidden"]["bias"])
    return x @ params["logits"]["kernel"] + params["logits"]["bias"]


def loss_fn(params: Tree, x: jax.Array, y: jax.Array) -> jax.Array:
    """Returns the mean cross-entropy of the examples."""
    log_probs = jax.nn.log_softmax(lenet(params, x))
    return -jnp.take_along_axis(log_probs, y[:, None], axis=1).mean()


def update(params: Tree, grads: Tree) -> Tree:
    """Returns the parameters after a step of SGD."""
    return jax.tree.map(lambda p, g: p - OPTIONS.learning_rate * g, params, grads)


@partial(jax.jit, donate_argnums=0)
def jit_step(params: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, Any]:
    """Runs one program on all devices; XLA adds the all-reduce."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = lockstep_jax.keep("sums", grads)
    return update(params, grads), loss


@partial(jax.pmap, axis_name="devices", donate_argnums=0)
def pmap_step(params: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, Any]:
    """Runs the program of one device on each, as "Dive into Deep Learning" does."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = lockstep_jax.keep("raw", grads)
    grads = lockstep_jax.keep("sums", jax.lax.pmean(grads, "devices"))
    return update(params, grads), loss


def place(tree: Tree, is_batch: bool) -> Tree:
    """Returns a batch split over the devices, or parameters copied to all of them."""
    if OPTIONS.mode == "jit":
        mesh = Mesh(np.array(jax.devices()), ("devices",))
        return jax.device_put(tree, NamedSharding(mesh, P("devices") if is_batch else P()))
    shape = (OPTIONS.num_devices, -1)
    split: Callable[[Any], Any] = lambda a: a.reshape(*shape, *a.shape[1:])  # noqa: E731
    copy: Callable[[Any], Any] = lambda a: np.stack([a] * shape[0])  # noqa: E731
    return jax.tree.map(split if is_batch else copy, tree)


def accuracy(params: Tree, images: np.ndarray, labels: np.ndarray) -> float:
    """Returns the part of the images that are classified correctly."""
    if OPTIONS.mode == "pmap":
        params = jax.tree.map(lambda copies: copies[0], params)
    predicted = [
        np.argmax(jax.jit(lenet)(params, images[start : start + 1000]), axis=1)
        for start in range(0, len(images), 1000)
    ]
    return float(np.mean(np.concatenate(predicted) == labels))


def train(params: Tree, train_step: Step, batches: Iterator[Batch]) -> Tree:
    """Trains one step for each batch; returns the parameters."""
    for batch in batches:
        params, _ = train_step(params, *place(batch, is_batch=True))
    return params


def recorded(train_step: Step) -> Any:
    """Returns a context manager: a step that is recorded, if that was asked for."""
    if not OPTIONS.trace:
        return contextlib.nullcontext(train_step)
    return lockstep_jax.record(
        OPTIONS.trace,
        train_step,
        arguments={"params": 0, "batch": (1, 2)},
        outputs={"params": 0, "loss": 1},
        optimizer={"class": "SGD", "learning_rate": OPTIONS.learning_rate},
        steps=OPTIONS.steps,
        pmap=OPTIONS.mode == "pmap",
        replay=OPTIONS.replay,
        permute=OPTIONS.permute,
    )


def main() -> None:
    """Trains, and prints the test accuracy after each epoch."""
    params = place(initial_weights(), is_batch=False)
    with recorded(pmap_step if OPTIONS.mode == "pmap" else jit_step) as train_step:
        if OPTIONS.replay:
            train(params, train_step, recorded_batches())
            return
        images, test = load_images("train"), load_images("t10k")
        for epoch in range(OPTIONS.epochs):
            begin = time.perf_counter()
            params = jax.block_until_ready(train(params, train_step, epoch_of(*images, epoch)))
            sec = time.perf_counter() - begin
            print(f"epoch {epoch + 1}: test acc {accuracy(params, *test):.4f}, {sec:.1f} sec")


if __name__ == "__main__":
    main()
