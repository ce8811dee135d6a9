"""Trains LeNet with Keras on one device, and on two devices in three ways.

    python examples/keras_three_ways.py

Each way is a function that trains for `NUM_STEPS` steps of plain SGD, from the same weights and on
the same batches of Fashion-MNIST:

* `one_device` calls `fit`. It is the reference.
* `by_hand` keeps a copy of the model and a tape on each device, and sums the gradients.
* `mirrored` calls `fit` under `tf.distribute.MirroredStrategy`.
* `data_parallel` calls `fit` under `keras.distribution.DataParallel`, with Keras' JAX backend.

Without an argument, the program runs each way in a process of its own, because a process has one
backend, and prints how far the weights are from those of `one_device`. With the name of a way, it
trains in this way; `docs/keras_three_ways.md` has the command that verifies all of them.

The devices are logical CPU devices. `data_parallel` needs JAX beside Keras: `pip install jax`.
"""

import gzip
import importlib.util
import os
import subprocess
import sys
import tempfile
from typing import Any

import keras
import numpy as np

import lockstep

NUM_DEVICES, BATCH_SIZE, NUM_STEPS, LEARNING_RATE = 2, 256, 3, 0.2
SHAPES = [(3, 3, 1, 20), (20,), (5, 5, 20, 50), (50,), (800, 128), (128,), (128, 10), (10,)]
# The variables of each process; logical CPU devices of TensorFlow are created in the program.
VARIABLES = {
    "data_parallel": {
        "KERAS_BACKEND": "jax",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={NUM_DEVICES}",
    }
}


def load_examples() -> tuple[np.ndarray, np.ndarray]:
    """Returns images `(n, 28, 28, 1)` in [0, 1] and labels, of `NUM_STEPS` batches."""
    if folder := os.environ.get("FASHION_MNIST_DIR"):
        with gzip.open(f"{folder}/train-images-idx3-ubyte.gz") as file:
            images = np.frombuffer(file.read(), np.uint8, offset=16).reshape(-1, 28, 28)
        with gzip.open(f"{folder}/train-labels-idx1-ubyte.gz") as file:
            labels = np.frombuffer(file.read(), np.uint8, offset=8)
    else:
        (images, labels), _ = keras.datasets.fashion_mnist.load_data()  # Downloads 30 MB once.
    num_examples = NUM_STEPS * BATCH_SIZE
    images = images[:num_examples, ..., None].astype(np.float32) / 255
    return images, labels[:num_examples].astype(np.int32)


def build_model() -> keras.Model:
    """Builds LeNet with the same initial weights in each call and with each backend."""
    layers = keras.layers
    model = keras.Sequential([keras.Input((28, 28, 1))])
    for width, size in [(20, 3), (50, 5)]:
        model.add(layers.Conv2D(width, size, activation="relu"))
        model.add(layers.AveragePooling2D(2))
    model.add(layers.Flatten())
    model.add(layers.Dense(128, activation="relu"))
    model.add(layers.Dense(10))
    random = np.random.default_rng(0)
    model.set_weights([random.normal(0, 0.05, s) if len(s) > 1 else np.zeros(s) for s in SHAPES])
    return model


def build_compiled_model() -> keras.Model:
    """Builds LeNet with SGD and the mean of the cross-entropy over the batch, for `fit`."""
    model = build_model()
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(LEARNING_RATE), loss)
    return model


def one_device(images: np.ndarray, labels: np.ndarray) -> keras.Model:
    """Trains on one device."""
    model = build_compiled_model()
    with lockstep.record(model):
        model.fit(images, labels, BATCH_SIZE, shuffle=False, verbose=0)
    return model


def by_hand(images: np.ndarray, labels: np.ndarray) -> keras.Model:
    """Trains with a copy of the model on each device; returns the first copy."""
    import tensorflow as tf

    devices, copies = create_logical_devices(), []
    for device in devices:
        with tf.device(device):
            copies.append(build_model())
    first, optimizer = copies[0], keras.optimizers.SGD(LEARNING_RATE)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(images: tf.Tensor, labels: tf.Tensor) -> None:
        shards = zip(tf.split(images, NUM_DEVICES), tf.split(labels, NUM_DEVICES), strict=True)
        per_device_gradients = []
        for device, copy, (x, y) in zip(devices, copies, shards, strict=True):
            with tf.device(device):
                for weight, value in zip(copy.weights, first.weights, strict=True):
                    weight.assign(value)
                with tf.GradientTape() as tape:
                    losses = loss(y, copy(x, training=True)) / BATCH_SIZE
                per_device_gradients.append(tape.gradient(losses, copy.trainable_variables))
        sums = [tf.add_n(gradients) for gradients in zip(*per_device_gradients, strict=True)]
        optimizer.apply(sums, first.trainable_variables)

    with lockstep.record(first, optimizer) as recorder:
        train_step = tf.function(recorder.wrap(step))
        for start in range(0, len(images), BATCH_SIZE):
            rows = slice(start, start + BATCH_SIZE)
            train_step(tf.constant(images[rows]), tf.constant(labels[rows]))
    return first


def mirrored(images: np.ndarray, labels: np.ndarray) -> keras.Model:
    """Trains under `MirroredStrategy`, which keeps a copy on each device."""
    import tensorflow as tf

    with tf.distribute.MirroredStrategy(create_logical_devices()).scope():
        model = build_compiled_model()
    with lockstep.record(model):
        model.fit(images, labels, BATCH_SIZE, shuffle=False, verbose=0)
    return model


def data_parallel(images: np.ndarray, labels: np.ndarray) -> keras.Model:
    """Trains under `DataParallel`, which keeps a copy on each device of JAX."""
    keras.distribution.set_distribution(keras.distribution.DataParallel())
    model = build_compiled_model()
    if "LOCKSTEP_RECORD" not in os.environ:
        model.fit(images, labels, BATCH_SIZE, shuffle=False, verbose=0)
        return model
    with lockstep.record(**jax_step(model)) as step:
        model.train_function = lambda state, batches: step(*state, next(batches))
        model.fit(images, labels, BATCH_SIZE, shuffle=False, verbose=0)
    return model


def jax_step(model: keras.Model) -> dict[str, Any]:
    """Returns the step that `fit` compiles, as a function, and where its arrays are.

    The recorder of JAX needs both: it records a function that gets and returns the state. The
    metrics start from 0 in each step, so that the loss is that of the batch, not of the epoch. What
    the optimizer gets are the sums of the gradients over the devices.
    """
    import jax

    from lockstep import record_jax

    update = model.optimizer.stateless_apply

    def keep_and_update(state: Any, gradients: Any, weights: Any) -> Any:
        return update(state, record_jax.keep("sums", gradients), weights)

    model.optimizer.stateless_apply = keep_and_update

    @jax.jit
    def step(weights: Any, others: Any, optimizer_state: Any, metrics: Any, batch: Any) -> Any:
        metrics = [0 * metric for metric in metrics]
        return model.train_step((weights, others, optimizer_state, metrics), batch)

    return {
        "model": step,
        "optimizer": {"class": "SGD", "learning_rate": LEARNING_RATE},
        "arguments": {"params": 0, "opt_state": 2, "batch": 4},
        "outputs": {"params": "1/0", "opt_state": "1/2", "loss": "0/loss"},
    }


def create_logical_devices() -> list[str]:
    """Creates logical CPU devices of TensorFlow; returns their names."""
    import tensorflow as tf

    parts = [tf.config.LogicalDeviceConfiguration()] * NUM_DEVICES
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], parts)
    return [f"/device:CPU:{i}" for i in range(NUM_DEVICES)]


WAYS = {way.__name__: way for way in (one_device, by_hand, mirrored, data_parallel)}


def main() -> None:
    """Trains in each way, and prints the largest difference of a weight from `one_device`."""
    start, expected = build_model().get_weights(), None
    with tempfile.TemporaryDirectory() as folder:
        for way in WAYS:
            if way == "data_parallel" and not importlib.util.find_spec("jax"):
                print(f"{way}: not run; it needs JAX: pip install jax")
                continue
            command = [sys.executable, __file__, way, f"{folder}/{way}.npz"]
            subprocess.run(command, env={**os.environ, **VARIABLES.get(way, {})}, check=True)
            with np.load(f"{folder}/{way}.npz") as file:
                weights = list(file.values())
            expected = expected or weights
            changed, apart = farthest(weights, start), farthest(weights, expected)
            print(f"{way}: changed by up to {changed:.2g}, {apart:.2g} from one device")


def farthest(weights: list[np.ndarray], others: list[np.ndarray]) -> float:
    """Returns the largest absolute difference of two elements."""
    return max(np.abs(a - b).max() for a, b in zip(weights, others, strict=True))


if __name__ == "__main__":
    if len(sys.argv) == 1:
        main()
    else:
        trained = WAYS[sys.argv[1]](*load_examples())
        if len(sys.argv) > 2:
            np.savez(sys.argv[2], *trained.get_weights())
