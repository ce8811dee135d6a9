"""Variables of which several devices have a part, or a copy, each."""

from collections.abc import Sequence

import numpy as np
import tensorflow as tf


class SplitVariable:
    """Stands for a whole variable that is in parts on several devices.

    Args:
        parts: variables, each on its device, that make up the whole when they are joined.
        axis: along which they are joined.
        shape: of the whole; None where it is that of the joined parts. Parts that are ranges of
            its elements are flat.
    """

    def __init__(
        self, parts: Sequence[tf.Variable], axis: int, shape: Sequence[int] | None = None
    ):
        self.parts, self.axis = list(parts), axis
        sizes = [part.shape[axis] for part in self.parts]
        self._bounds = np.cumsum(sizes)[:-1]
        joined = self.parts[0].shape.as_list()
        joined[axis] = sum(sizes)
        self._joined_shape = joined
        self.shape = tf.TensorShape(joined if shape is None else shape)
        self.dtype = tf.as_dtype(self.parts[0].dtype)

    def numpy(self) -> np.ndarray:
        """Returns the whole."""
        return np.concatenate([p.numpy() for p in self.parts], self.axis).reshape(self.shape)

    def assign(self, value: np.ndarray) -> None:
        """Assigns its part of a whole array to each device."""
        joined = np.reshape(value, self._joined_shape)
        for part, piece in zip(
            self.parts, np.split(joined, self._bounds, self.axis), strict=True
        ):
            part.assign(piece)


class RepeatedVariable:
    """Stands for a variable that several devices have, always with the same value.

    Args:
        copies: that of each device.
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
