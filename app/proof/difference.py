"""How far apart the weights of two trainings are."""

import dataclasses
from collections.abc import Mapping

import numpy as np


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
            a, b = first[name], second[name]
            if a.tobytes() == b.tobytes():
                continue
            a, b = a.astype(np.float64), b.astype(np.float64)
            absolute = float(np.max(np.abs(a - b)))
            if worst.identical or not absolute <= worst.absolute:
                largest = float(max(np.max(np.abs(a)), np.max(np.abs(b))))
                worst = cls(name.removeprefix("model/"), absolute, absolute / (largest or 1.0))
        return worst
