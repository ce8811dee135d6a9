"""Tensors, variables and nests of TensorFlow, as arrays."""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import tree


def leaves(structure: Any) -> list[Any]:
    """Returns the leaves of a nest, without None."""
    return [leaf for leaf in tree.flatten(structure) if leaf is not None]


def plain_copy(array: Any) -> np.ndarray:
    """Returns a copy of an array, with strings, which are objects, as bytes of one length."""
    copy = np.array(array)
    return copy.astype(np.bytes_) if copy.dtype == object else copy


def tensor_of(variable: Any) -> Any:
    """Returns the variable of TensorFlow."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def tensors_of(value: Any) -> list[tf.Tensor]:
    """Returns a tensor, or a variable's value; of a gradient of rows values, indices and size.

    bfloat16, which NumPy cannot save, becomes float32.
    """
    if isinstance(value, tf.IndexedSlices):
        return [*tensors_of(value.values), value.indices, value.dense_shape[0]]
    tensor = tf.convert_to_tensor(tensor_of(value))
    return [tf.cast(tensor, tf.float32) if tensor.dtype == tf.bfloat16 else tensor]


def is_seed(variable: keras.Variable) -> bool:
    """Returns whether a variable is the state of a `keras.random.SeedGenerator`."""
    return bool(variable.name == "seed_generator_state")


def replica_id() -> int:
    """Returns the number of this replica; -1 outside of a replica's step."""
    context = tf.distribute.get_replica_context()
    return int(tf.get_static_value(context.replica_id_in_sync_group)) if context else -1


def permuted(data: Any, number: tf.Tensor, seed: Sequence[int]) -> Any:
    """Returns a batch with its examples in another order, if its step is recorded."""

    def order(number: np.int64, size: np.int32) -> np.ndarray:
        if number < 0:
            return np.arange(int(size))
        return np.random.default_rng([*seed, int(number)]).permutation(int(size))

    chosen = tf.numpy_function(order, [number, tf.shape(leaves(data)[0])[0]], tf.int64)

    def permute(leaf: Any) -> Any:
        return leaf if leaf is None else tf.ensure_shape(tf.gather(leaf, chosen), leaf.shape)

    return tree.map_structure(permute, data)


def replicas_here(strategy: tf.distribute.Strategy) -> list[int]:
    """Returns the numbers of the replicas of this process."""

    def number() -> tf.Tensor:
        return tf.identity(tf.distribute.get_replica_context().replica_id_in_sync_group)

    found = tf.function(lambda: strategy.run(number))()
    return [int(each) for each in strategy.experimental_local_results(found)]
