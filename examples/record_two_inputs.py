"""Records a Keras model with two inputs, two outputs and sample weights, averaged by weight.

    PYTHONPATH=. .venv/bin/python -m lockstep run \
        --reference ".venv/bin/python examples/record_two_inputs.py 1" \
        --variant "wrong=.venv/bin/python examples/record_two_inputs.py 2"

The argument is the number of devices. `reduction="mean_with_sample_weight"` divides by the weights
of a replica's own examples. With the default reduction, by the argument `corrected` of both
commands, two replicas and one device train alike.
"""

import sys

import keras
import numpy as np
import tensorflow as tf

import lockstep


def build_model(reduction: str) -> keras.Model:
    """Builds a compiled model with the loss reduction `reduction`."""
    image, tags = keras.Input((16,), name="image"), keras.Input((4,), name="tags")
    joined = keras.layers.Concatenate()([image, tags])
    hidden = keras.layers.Dense(12, activation="relu")(joined)
    model = keras.Model(
        {"image": image, "tags": tags},
        {
            "price": keras.layers.Dense(1, name="price")(hidden),
            "age": keras.layers.Dense(1, name="age")(hidden),
        },
    )
    model.compile(
        optimizer=keras.optimizers.Adam(1e-2),
        loss={
            "price": keras.losses.MeanSquaredError(reduction=reduction),
            "age": keras.losses.MeanAbsoluteError(reduction=reduction),
        },
        loss_weights={"price": 1.0, "age": 0.5},
    )
    return model


def load_batches() -> tf.data.Dataset:
    """Returns 10 batches of 60 examples with a weight for each output."""
    generator = np.random.default_rng(0)

    def numbers(*shape: int) -> np.ndarray:
        return generator.normal(size=shape).astype(np.float32)

    x = {"image": numbers(600, 16), "tags": numbers(600, 4)}
    y = {"price": numbers(600, 1), "age": numbers(600, 1)}
    weights = {name: generator.uniform(0.1, 2, 600).astype(np.float32) for name in y}
    return tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(60)


def main(num_devices: int, is_corrected: bool) -> None:
    """Trains on logical CPU devices."""
    (cpu,) = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration()] * num_devices
    )
    strategy = tf.distribute.MirroredStrategy([f"CPU:{i}" for i in range(num_devices)])
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = build_model("sum_over_batch_size" if is_corrected else "mean_with_sample_weight")
    with lockstep.record(model):
        model.fit(load_batches(), verbose=0)


if __name__ == "__main__":
    main(int(sys.argv[1]), "corrected" in sys.argv)
