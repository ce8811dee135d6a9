"""Records two steps of Keras' `fit` on one device and on two, for `python -m lockstep`.

    PYTHONPATH=. .venv/bin/python examples/record_fit.py 1 one.npz
    PYTHONPATH=. .venv/bin/python examples/record_fit.py 2 two.npz one.npz
    .venv/bin/python -m lockstep one.npz two.npz

The second run starts each recorded step from the state in the first recording. Keras clips the
gradients on each replica before the all-reduce; the verdict reports this fault.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

from lockstep import record_keras


def main(num_devices: int, path: str, replay: str | None = None) -> None:
    """Trains on logical CPU devices and writes the recording to `path`."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
    )
    strategy = tf.distribute.MirroredStrategy([f"/CPU:{i}" for i in range(num_devices)])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
        model.compile(keras.optimizers.SGD(0.1, clipnorm=0.01), "mse")
    generator = np.random.default_rng(0)
    examples = generator.normal(size=(64, 8)), generator.normal(size=(64, 4))
    dataset = tf.data.Dataset.from_tensor_slices(examples).batch(32)
    with record_keras.record(path, model, steps=[0, 1], replay=replay):
        model.fit(dataset, shuffle=False, verbose=0)


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
