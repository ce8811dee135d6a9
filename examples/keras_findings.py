"""Shows five faults of Keras under `tf.distribute`: each training on one device and on two.

    python examples/keras_findings.py
    python examples/keras_findings.py clipped overflow

It needs TensorFlow and Keras only. With a number of devices, one training of one step runs, which
can be recorded and compared:

    PYTHONPATH=. python -m lockstep run --steps=1 \
        --reference "python examples/keras_findings.py clipped 1" \
        --variant "python examples/keras_findings.py clipped 2"

`docs/keras_findings.md` explains what both print.
"""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

X = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
Y = X.sum(axis=1, keepdims=True)
IS_RECORDED = len(sys.argv) == 3 and sys.argv[2].isdigit()
NUMBERS_OF_DEVICES = [int(sys.argv[2])] if IS_RECORDED else [1, 2]


def trained(
    optimizer: Callable[[], Any], loss: Any, *arrays: np.ndarray, drops: bool = False
) -> Iterator[tuple[int, np.ndarray, Any]]:
    """Trains a linear model for one step; yields number of devices, kernel and optimizer."""
    for num_devices in NUMBERS_OF_DEVICES:
        devices = [f"CPU:{i}" for i in range(num_devices)]
        with tf.distribute.MirroredStrategy(devices).scope():
            layer = keras.layers.Dense(1, kernel_initializer="ones" if drops else "zeros")
            between = [keras.layers.Dropout(0.5, seed=1)] if drops else []
            model = keras.Sequential([keras.Input(arrays[0].shape[1:]), *between, layer])
            model.compile(optimizer(), loss)
        with recorded(model):
            model.fit(tf.data.Dataset.from_tensor_slices(arrays).batch(8), verbose=0)
        yield num_devices, layer.kernel.numpy(), model.optimizer


def recorded(model: keras.Model) -> Any:
    """Returns the block that records a training of one number of devices."""
    if not IS_RECORDED:
        return contextlib.nullcontext()
    import lockstep

    return lockstep.record(model)


def clipped() -> None:
    """Prints the length of an update that `clipnorm` should limit to 0.1."""
    for n, kernel, _ in trained(lambda: keras.optimizers.SGD(1.0, clipnorm=0.1), "mse", X, Y):
        print(n, np.linalg.norm(kernel))


def scalar() -> None:
    """Prints the length of an update with a loss that returns a scalar."""
    optimizer = lambda: keras.optimizers.SGD(0.1)  # noqa: E731
    for n, kernel, _ in trained(optimizer, lambda y, p: tf.reduce_mean(tf.square(y - p)), X, Y):
        print(n, np.linalg.norm(kernel))


def weighted() -> None:
    """Prints the weights after an update with a mean over sample weights."""
    weights = np.array([9.0] * 4 + [1.0] * 4, np.float32)
    loss = keras.losses.MeanSquaredError(reduction="mean_with_sample_weight")
    for n, kernel, _ in trained(lambda: keras.optimizers.SGD(0.1), loss, X, Y, weights):
        print(n, kernel.ravel())


def dropout() -> None:
    """Prints the dropout masks of two replicas in one step."""
    if IS_RECORDED:
        next(trained(lambda: keras.optimizers.SGD(0.1), "mse", X, Y, drops=True))
        return
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        layer = keras.layers.Dropout(0.5, seed=1)
    masks = strategy.run(tf.function(lambda: layer(tf.ones((1, 12)), training=True)))
    for mask in strategy.experimental_local_results(masks):
        print(mask.numpy().ravel())


def overflow() -> None:
    """Prints weight and loss scale after an overflow on the last replica, and on the first."""
    keras.config.set_dtype_policy("mixed_float16")
    x, y = np.ones((8, 1), "float32"), np.array([[1.0]] * 4 + [[100.0]] * 4, "float32")
    for targets in [y] if IS_RECORDED else [y, y[::-1]]:
        for n, kernel, optimizer in trained(lambda: keras.optimizers.SGD(0.1), "mse", x, targets):
            print(n, kernel.item(), optimizer.dynamic_scale.numpy())


def rows() -> None:
    """Prints number of rows and update of Adam for a gradient of an `Embedding`, on one device."""
    for values, indices in (([[1.0], [1.0]], [1, 1]), ([[2.0]], [1])):
        weight = keras.Variable(np.zeros((3, 1), "float32"))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([weight])
        gradient = tf.IndexedSlices(tf.constant(values), tf.constant(indices), (3, 1))
        optimizer.apply([gradient], [weight])
        print(len(indices), -weight.numpy()[1, 0])


FINDINGS = {each.__name__: each for each in (clipped, scalar, weighted, dropout, overflow, rows)}

if __name__ == "__main__":
    # Each in its own process: strategies of one process share collectives.
    if len(sys.argv) != 2 and not IS_RECORDED:
        for name in sys.argv[1:] or FINDINGS:
            subprocess.run([sys.executable, __file__, name], check=True)
        sys.exit()
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
    print(f"{sys.argv[1]}: {FINDINGS[sys.argv[1]].__doc__}", flush=True)
    FINDINGS[sys.argv[1]]()
