"""Measures differences of arrays: absolute, relative and in ULPs of float32."""

import dataclasses
from collections.abc import Mapping

import numpy as np


@dataclasses.dataclass(frozen=True)
class Difference:
    """The largest difference between two arrays of one shape.

    Attributes:
        absolute: largest difference of two elements; NaN if one of them is NaN.
        relative: `absolute` over the largest magnitude in either array.
        ulps: float32 numbers between the two elements with the largest difference.
    """

    absolute: float
    relative: float
    ulps: int

    @classmethod
    def between(cls, first: np.ndarray, second: np.ndarray) -> "Difference":
        """Compares two arrays of any float types in float64."""
        a, b = np.asarray(first, np.float64).ravel(), np.asarray(second, np.float64).ravel()
        with np.errstate(invalid="ignore"):
            apart = np.abs(a - b)
        if not apart.size or not np.any(apart != 0):  # NaN is not equal to 0.
            return cls(0.0, 0.0, 0)
        where = int(np.argmax(apart))  # The first NaN, if there is one.
        absolute = float(apart[where])
        largest = float(max(np.max(np.abs(a)), np.max(np.abs(b))))
        return cls(absolute, absolute / (largest or 1.0), _ulps(a[where], b[where]))


def _ulps(a: float, b: float) -> int:
    """Counts the float32 numbers between two numbers; -1 if one of them is not finite."""
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
        tensor: name of the array with the largest difference; "" if all are bitwise identical.
        absolute: largest difference of two elements; NaN if one of them is NaN.
        relative: `absolute` over the largest magnitude in that array.
    """

    tensor: str
    absolute: float
    relative: float

    @property
    def identical(self) -> bool:
        """Whether all arrays are bitwise identical."""
        return not self.tensor

    @classmethod
    def between(
        cls, first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]
    ) -> "WeightDifference":
        """Compares the model's arrays of two states, without optimizer state.

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
