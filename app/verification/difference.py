"""How far apart arrays are: in absolute terms, relative to their size, and in float32 steps."""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference between two arrays of one shape.

    Attributes:
        absolute: of two elements; NaN if one of them is.
        relative: the same, over the largest magnitude in either array.
        ulps: float32 numbers between the two elements that are farthest apart.
    """

    absolute: float
    relative: float
    ulps: int

    @classmethod
    def between(cls, first: np.ndarray, second: np.ndarray) -> "Difference":
        """Compares two arrays, of whatever float types, as exactly as float64 can."""
        a, b = np.asarray(first, np.float64).ravel(), np.asarray(second, np.float64).ravel()
        apart = np.abs(a - b)
        if not apart.size or not np.any(apart != 0):  # NaN is not equal to 0.
            return cls(0.0, 0.0, 0)
        where = int(np.argmax(apart))  # The first NaN, where there is one.
        absolute = float(apart[where])
        largest = float(max(np.max(np.abs(a)), np.max(np.abs(b))))
        return cls(absolute, absolute / (largest or 1.0), _ulps(a[where], b[where]))


def _ulps(a: float, b: float) -> int:
    """Counts the float32 numbers from one to the other; -1 if one of them is not finite."""
    pair = np.array([a, b], np.float32)
    if not np.all(np.isfinite(pair)):
        return -1
    bits = pair.view(np.int32).astype(np.int64)
    ordered = np.where(bits < 0, -(bits & 0x7FFFFFFF), bits)  # Signed magnitude to a number line.
    return int(abs(ordered[0] - ordered[1]))


@dataclasses.dataclass(frozen=True)
class WeightDifference:
    """The largest difference between the model's arrays of two states.

    Attributes:
        tensor: name of the array in which it is found, "" where all are bit-identical.
        absolute: largest difference of two elements; NaN if one of them is.
        relative: the same, over the largest magnitude in that array.
    """

    tensor: str
    absolute: float
    relative: float

    @property
    def identical(self) -> bool:
        """Whether both hold the same bits."""
        return not self.tensor

    @classmethod
    def between(
        cls, first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
    ) -> "WeightDifference":
        """Compares the model's arrays of two states; optimizer slots are left out.

        Raises:
            ValueError: the states are of different models.
        """
        names = [name for name in first if name.startswith("model/")]
        if names != [name for name in second if name.startswith("model/")]:
            raise ValueError("states of different models cannot be compared")
        worst = cls("", 0.0, 0.0)
        for name in names:
            if first[name].tobytes() == second[name].tobytes():
                continue
            difference = Difference.between(first[name], second[name])
            if worst.identical or not difference.absolute <= worst.absolute:
                tensor = name.removeprefix("model/")
                worst = cls(tensor, difference.absolute, difference.relative)
        return worst
