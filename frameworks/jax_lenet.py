"""Trains LeNet on Fashion-MNIST with JAX on CPU devices, and records steps of the training.

    python jax_lenet.py --weights=lenet.npz --order=order.npy --trace=jax_pmap.npz --mode=pmap

`--weights` is an `.npz` of the weights of the Keras model: "conv1/kernel", "conv1/bias",
…, "logits/bias". `--order` is a `.npy` with the number of the example at each position of the
training: the first `--batch_size` numbers are the first batch. The data is read from
FASHION_MNIST_DIR. It needs JAX and NumPy, and the recorder of this project.
"""

import argparse
import gzip
import os
import pathlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

LAYERS = ("conv1", "conv2", "hidden", "logits")


def parse_arguments() -> argparse.Namespace:
    """Returns the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mode", choices=["jit", "pmap"], default="jit")
    parser.add_argument("--num_devices", type=int, default=2)
    parser.add_argument("--weights", required=True, help=".npz with the initial weights")
    parser.add_argument("--order", required=True, help=".npy with the order of the examples")
    parser.add_argument("--batch_size", type=int, default=256, help="of all devices together")
    parser.add_argument("--learning_rate", type=float, default=0.1)
    parser.add_argument("--momentum", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=20, help="number of steps to train and record")
    parser.add_argument("--trace", required=True, help="file to record to")
    parser.add_argument("--replay", help="trace to load the state from before each step")
    parser.add_argument("--permute", type=int, help="seed to permute the examples of each device")
    return parser.parse_args()


OPTIONS = parse_arguments()
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={OPTIONS.num_devices}"
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "recorders"))

import jax  # noqa: E402 (The number of devices is fixed when JAX starts.)
import jax.numpy as jnp  # noqa: E402
import lockstep_jax  # noqa: E402
from jax.sharding import Mesh, NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

Tree = Any


def load_data() -> tuple[np.ndarray, np.ndarray]:
    """Returns the images, (n, 28, 28, 1) from 0 to 1, and the labels of the training set."""
    folder = pathlib.Path(os.environ["FASHION_MNIST_DIR"])
    with gzip.open(folder / "train-images-idx3-ubyte.gz") as file:
        images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
    with gzip.open(folder / "train-labels-idx1-ubyte.gz") as file:
        labels = np.frombuffer(file.read(), np.uint8, offset=8)
    return images.astype(np.float32) / np.float32(255), labels.astype(np.int32)


def load_weights(path: str) -> Tree:
    """Returns the parameters of all layers."""
    with np.load(path) as file:
        return {
            layer: {part: file[f"{layer}/{part}"] for part in ("kernel", "bias")}
            for layer in LAYERS
        }


def batches() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields the batches in the order that was passed."""
    images, labels = load_data()
    order = np.load(OPTIONS.order)
    for step in range(OPTIONS.steps):
        rows = order[step * OPTIONS.batch_size :][: OPTIONS.batch_size]
        yield images[rows], labels[rows]


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


def update(params: Tree, velocity: Tree, grads: Tree) -> tuple[Tree, Tree]:
    """Returns the parameters and velocities after a step of SGD."""
    rate, momentum = OPTIONS.learning_rate, OPTIONS.momentum
    velocity = jax.tree.map(lambda v, g: momentum * v + g, velocity, grads)
    return jax.tree.map(lambda p, v: p - rate * v, params, velocity), velocity


@partial(jax.jit, donate_argnums=(0, 1))
def jit_step(params: Tree, velocity: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, Tree, Any]:
    """Runs one program on all devices; XLA adds the all-reduce."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = lockstep_jax.keep("sums", grads)
    return *update(params, velocity, grads), loss


@partial(jax.pmap, axis_name="devices", donate_argnums=(0, 1))
def pmap_step(params: Tree, velocity: Tree, x: jax.Array, y: jax.Array) -> tuple[Tree, Tree, Any]:
    """Runs the program of one device on each, as "Dive into Deep Learning" does."""
    loss, grads = jax.value_and_grad(loss_fn)(params, x, y)
    grads = lockstep_jax.keep("raw", grads)
    grads = lockstep_jax.keep("sums", jax.lax.pmean(grads, "devices"))
    return *update(params, velocity, grads), loss


def place(tree: Tree, is_batch: bool) -> Tree:
    """Returns a batch split over the devices, or parameters copied to all of them."""
    if OPTIONS.mode == "jit":
        mesh = Mesh(np.array(jax.devices()), ("devices",))
        return jax.device_put(tree, NamedSharding(mesh, P("devices") if is_batch else P()))
    shape = (OPTIONS.num_devices, -1)
    split: Callable[[Any], Any] = lambda a: a.reshape(*shape, *a.shape[1:])  # noqa: E731
    copy: Callable[[Any], Any] = lambda a: np.stack([a] * shape[0])  # noqa: E731
    return jax.tree.map(split if is_batch else copy, tree)


def main() -> None:
    """Trains, prints the loss of each step, and records."""
    params = load_weights(OPTIONS.weights)
    velocity = place(jax.tree.map(np.zeros_like, params), is_batch=False)
    params = place(params, is_batch=False)
    state = {"params": 0, "opt_state": 1}
    recorder = lockstep_jax.record(
        OPTIONS.trace,
        pmap_step if OPTIONS.mode == "pmap" else jit_step,
        arguments=state | {"batch": (2, 3)},
        outputs=state | {"loss": 2},
        optimizer={
            "class": "SGD",
            "learning_rate": OPTIONS.learning_rate,
            "momentum": OPTIONS.momentum,
        },
        steps=OPTIONS.steps,
        pmap=OPTIONS.mode == "pmap",
        replay=OPTIONS.replay,
        permute=OPTIONS.permute,
    )
    with recorder as train_step:
        for step, batch in enumerate(batches()):
            params, velocity, loss = train_step(params, velocity, *place(batch, is_batch=True))
            print(f"step {step}: loss {np.mean(loss):.6f}")


if __name__ == "__main__":
    main()
