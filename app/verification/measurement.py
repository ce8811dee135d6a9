"""Defines the measurement of one array of one step, with its tolerance."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from app.verification.difference import Difference
from app.verification.trace import KINDS

UNIT_ROUNDOFF = np.finfo(np.float32).eps / 2  # Relative error of one rounding to nearest.
SMALLEST = np.finfo(np.float32).tiny  # Smaller numbers may be flushed to 0.

Where = tuple[int, str, str, int]  # Step, kind, tensor and replica ID of a measurement.


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The difference of one array of one step from the reference.

    Attributes:
        step: step number, from 1; 0 for the initial state.
        kind: a key of `trace.KINDS`.
        tensor: name of the tensor.
        replica_id: replica that holds the array.
        absolute: largest difference from the float64 reference; for "examples", the number of wrong
            ones.
        relative: `absolute` over the largest magnitude in the array.
        ulps: `absolute` in ULPs of float32.
        absolute32: largest difference from the float32 reference; 0 if bitwise identical.
        error: value to compare with `limit`. For values that a replica computes, the relative error
            in the Euclidean norm; for arrays with a bound per element, the largest ratio of
            difference and bound.
        limit: maximum of `error` within tolerance.
    """

    step: int
    kind: str
    tensor: str
    replica_id: int
    absolute: float
    relative: float
    ulps: int
    absolute32: float
    error: float
    limit: float

    @property
    def within_tolerance(self) -> bool:
        """Whether the array is bitwise identical to the reference or differs only by rounding."""
        return self.absolute32 == 0 or self.error <= self.limit

    @property
    def order(self) -> tuple[int, int]:
        """Sort key for the order of computation: the first mismatch explains the later ones."""
        return self.step, list(KINDS).index(self.kind)

    @property
    def excess(self) -> float:
        """The error over its limit; infinite if no difference is allowed."""
        if math.isnan(self.error):
            return math.inf
        if self.limit:
            return self.error / self.limit
        return math.inf if self.error else 0.0

    @property
    def tolerance(self) -> float:
        """Upper bound of `absolute` if all differences are scaled equally."""
        return self.absolute / self.excess if self.excess else math.nan

    @classmethod
    def of(
        cls,
        where: Where,
        actual: np.ndarray,
        expected: np.ndarray,
        float32: np.ndarray | None = None,
    ) -> "Measurement":
        """Measures an array that must be bitwise equal, or whose limit is computed later.

        Args:
            where: step, kind, tensor and replica.
            actual: array of the trace.
            expected: float64 reference.
            float32: float32 reference, if different.
        """
        difference = Difference.between(actual, expected)
        absolute32 = (
            difference.absolute if float32 is None else Difference.between(actual, float32).absolute
        )
        return cls(
            *where,
            absolute=difference.absolute,
            relative=difference.relative,
            ulps=difference.ulps,
            absolute32=absolute32,
            error=relative_error(actual, expected),
            limit=0.0,
        )

    @classmethod
    def bounded(
        cls,
        where: Where,
        actual: np.ndarray,
        expected: np.ndarray,
        float32: np.ndarray,
        bound: np.ndarray,
    ) -> "Measurement":
        """Measures an array with a bound for each element.

        Args:
            where: step, kind, tensor and replica.
            actual: array of the trace.
            expected: float64 reference.
            float32: float32 reference.
            bound: bound of the error of each element, above 0.
        """
        share = float(np.max(np.abs(np.asarray(actual, np.float64) - expected) / bound))
        return dataclasses.replace(cls.of(where, actual, expected, float32), error=share, limit=1.0)

    @classmethod
    def counted(cls, where: Where, count: int) -> "Measurement":
        """Returns the measurement of a number of errors, of which none is allowed."""
        return cls(*where, float(count), 0.0, 0, float(count), error=float(count), limit=0.0)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns ‖actual − expected‖ / ‖expected‖; over the smallest number if `expected` is 0."""
    expected = np.asarray(expected, np.float64)
    return _norm(actual - expected) / max(_norm(expected), float(SMALLEST))


def _norm(array: np.ndarray) -> float:
    """Returns the Euclidean norm, without BLAS, whose threads wait for a core in every call."""
    return math.sqrt(np.sum(np.square(array)))


def first_mismatch(measurements: Sequence[Measurement]) -> Measurement | None:
    """Returns the first measurement out of tolerance, among simultaneous ones the worst."""
    mismatches = [m for m in measurements if not m.within_tolerance]
    if not mismatches:
        return None
    first = min(m.order for m in mismatches)
    return max((m for m in mismatches if m.order == first), key=lambda m: m.excess)
