"""Small models, data sets and input pipelines that several cases of the zoo are made of."""

from collections.abc import Callable, Sequence

import keras
import numpy as np
import tensorflow as tf


def regression_data(global_batch_size: int, num_examples: int = 24) -> tf.data.Dataset:
    """Returns batches of 6 numbers and 2 targets, the same ones on every call."""
    return tf.data.Dataset.from_tensor_slices(regression_arrays(num_examples)).batch(
        global_batch_size
    )


def regression_arrays(num_examples: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs of shape (examples, 6) and targets of shape (examples, 2)."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(num_examples, 6)).astype("float32")
    return x, np.tanh(x @ generator.normal(size=(6, 2))).astype("float32")


def image_data(global_batch_size: int, num_examples: int = 24) -> tf.data.Dataset:
    """Returns batches of images of shape (8, 8, 3) and of labels from 0 to 3."""
    generator = np.random.default_rng(0)
    images = generator.normal(size=(num_examples, 8, 8, 3)).astype("float32")
    labels = generator.integers(0, 4, num_examples)
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(global_batch_size)


def dense_layers(*between: keras.layers.Layer, **options: object) -> list:
    """Returns the layers of a small network for `regression_data`.

    Args:
        between: layers between the two dense ones.
        options: of the first dense layer.
    """
    return [
        keras.Input((6,)),
        keras.layers.Dense(8, activation="tanh", name="hidden", **options),
        *between,
        keras.layers.Dense(2, name="out"),
    ]


def compiled_dense(
    optimizer: keras.optimizers.Optimizer | None = None,
    loss: str | Callable = "mse",
    kind: type[keras.Sequential] = keras.Sequential,
) -> keras.Model:
    """Returns a compiled network for `regression_data`, trained with SGD by default."""
    model = kind(dense_layers(), name="network")
    model.compile(optimizer=optimizer or keras.optimizers.SGD(0.1), loss=loss)
    return model


def one_pipeline_for_each_replica(
    strategy: tf.distribute.Strategy, pipelines: Sequence[tf.data.Dataset]
) -> tf.distribute.DistributedDataset:
    """Hands the n-th batch of pipeline r to replica r in step n.

    It stands for programs that run once for each device, each with a separate input pipeline.
    """

    def in_turn(*batches: tuple) -> tf.data.Dataset:
        turns = tf.data.Dataset.from_tensors(batches[0])
        for batch in batches[1:]:
            turns = turns.concatenate(tf.data.Dataset.from_tensors(batch))
        return turns

    merged = tf.data.Dataset.zip(*pipelines).flat_map(in_turn)
    return strategy.distribute_datasets_from_function(lambda context: merged)


def replica_id() -> tf.Tensor:
    """Returns the number of the replica that this runs on; 0 without a strategy."""
    return tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, "int32")
