"""Represents variables that are split or copied over several devices."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


class SplitVariable:
    """Represents a whole variable that is split over several devices.

    Args:
        parts: variables, each on its device, that form the whole when joined.
        axis: axis along which the parts are joined.
        shape: shape of the whole, if the parts are flat ranges of its elements; None for the shape
            of the joined parts.
    """

    def __init__(self, parts: Sequence[tf.Variable], axis: int, shape: Sequence[int] | None = None):
        self.parts, self.axis = list(parts), axis
        sizes = [part.shape[axis] for part in self.parts]
        self._bounds = np.cumsum(sizes)[:-1]
        joined = self.parts[0].shape.as_list()
        joined[axis] = sum(sizes)
        self._joined_shape = joined
        self.shape = tf.TensorShape(joined if shape is None else shape)
        self.dtype = tf.as_dtype(self.parts[0].dtype)

    def numpy(self) -> np.ndarray:
        """Returns the whole array."""
        return np.concatenate([p.numpy() for p in self.parts], self.axis).reshape(self.shape)

    def assign(self, value: np.ndarray) -> None:
        """Assigns to each device its part of a whole array."""
        joined = np.reshape(value, self._joined_shape)
        for part, piece in zip(self.parts, np.split(joined, self._bounds, self.axis), strict=True):
            part.assign(piece)


class RepeatedVariable:
    """Represents a variable that is copied to several devices, with equal values.

    Args:
        copies: one variable per device.
    """

    def __init__(self, copies: Sequence[tf.Variable]):
        self.copies, self.shape = list(copies), copies[0].shape
        self.dtype = tf.as_dtype(copies[0].dtype)

    def numpy(self) -> np.ndarray:
        """Returns the value on the first device."""
        return self.copies[0].numpy()

    def assign(self, value: np.ndarray) -> None:
        """Assigns a value on every device."""
        for copy in self.copies:
            copy.assign(value)
