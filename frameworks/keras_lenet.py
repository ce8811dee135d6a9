"""Trains LeNet on Fashion-MNIST with Keras' `fit` and `tf.distribute.MirroredStrategy`.

    python frameworks/keras_lenet.py --num_devices=2 --epochs=1

This is the training of "Dive into Deep Learning", section "Concise Implementation for Multiple
GPUs", on logical CPU devices: weights N(0, 0.01²), plain SGD. It needs TensorFlow, and the four
files of Fashion-MNIST in `$FASHION_MNIST_DIR`. `docs/frameworks.md` has the command that compares
it with the same training in other frameworks.
"""

import os
import pathlib
import sys

import keras
import numpy as np
import tensorflow as tf

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import common

import lockstep


def create_model(strategy: tf.distribute.Strategy) -> keras.Model:
    """Creates a compiled LeNet, the variables of which have a copy on each device."""
    layers, normal = keras.layers, keras.initializers.RandomNormal(stddev=0.01, seed=0)
    with strategy.scope():
        model = keras.Sequential([
            keras.Input((28, 28, 1)),
            layers.Conv2D(20, 3, activation="relu", kernel_initializer=normal, name="conv1"),
            layers.AveragePooling2D(2),
            layers.Conv2D(50, 5, activation="relu", kernel_initializer=normal, name="conv2"),
            layers.AveragePooling2D(2),
            layers.Flatten(),
            layers.Dense(128, activation="relu", kernel_initializer=normal, name="hidden"),
            layers.Dense(10, kernel_initializer=normal, name="logits"),
        ])  # fmt: skip
        model.compile(
            keras.optimizers.SGD(common.LEARNING_RATES["lenet"]),
            keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"],
        )
    return model


def main() -> None:
    """Trains, and prints the test accuracy after each epoch, but not after `--num_steps` steps."""
    parser = common.create_parser(__doc__.splitlines()[0])
    parser.add_argument("--num_devices", type=int, default=1)
    options = parser.parse_args()
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * options.num_devices
    )
    names = [f"/CPU:{number}" for number in range(options.num_devices)]
    model = create_model(tf.distribute.MirroredStrategy(names))
    data, (images, labels) = common.read_fashion_mnist(os.environ.get("FASHION_MNIST_DIR", ""))
    with lockstep.record(model):
        for epoch in range(1 if options.num_steps else options.epochs):
            batches = [*common.batches_of(options, data, epoch, options.num_devices)]
            x, y = map(np.concatenate, zip(*batches[: options.num_steps], strict=True))
            model.fit(x / np.float32(255), y, options.global_batch_size, shuffle=False, verbose=0)
            if not options.num_steps:
                _, accuracy = model.evaluate(images / np.float32(255), labels, 1000, verbose=0)
                print(f"epoch {epoch + 1}: test acc {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
