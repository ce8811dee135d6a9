"""Modes of a model on one device."""

import contextlib
from collections.abc import Iterator

import keras
import tensorflow as tf


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """Makes Keras build and run models in float64 in a `with` block."""
    floatx, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(floatx)
        keras.config.set_dtype_policy(policy)


@contextlib.contextmanager
def as_replica(number: int) -> Iterator[None]:
    """Runs a step on one device with the number of a replica, in a group of one."""
    with tf.distribute.ReplicaContext(tf.distribute.get_strategy(), number):
        yield
