"""One comparison of one array of one step, and how exact it had to be."""

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
    """How far one array of one step is from what it should be.

    Attributes:
        step: from 1; 0 for what a training starts from.
        kind: a key of `trace.KINDS`.
        tensor: its name.
        replica_id: the replica that holds it.
        absolute: largest difference from the float64 reference; for "examples", how many are wrong.
        relative: the same, over the largest magnitude in the array.
        ulps: the same, in float32 steps.
        absolute32: largest difference from the float32 reference; 0 if bit-identical to it.
        error: compared with `limit`. Of what a replica computes, the relative error in the
            Euclidean norm; where each element has a bound of its own, the largest share of it that
            is used.
        limit: how large `error` may be.
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
        """Whether the array is the reference bit for bit, or differs from it by rounding alone."""
        return self.absolute32 == 0 or self.error <= self.limit

    @property
    def order(self) -> tuple[int, int]:
        """When it was computed: the first mismatch explains those after it."""
        return self.step, list(KINDS).index(self.kind)

    @property
    def excess(self) -> float:
        """The error over what it may be, infinite for what may not differ at all."""
        if math.isnan(self.error):
            return math.inf
        if self.limit:
            return self.error / self.limit
        return math.inf if self.error else 0.0

    @property
    def tolerance(self) -> float:
        """What `absolute` could be at most, were all differences scaled alike."""
        return self.absolute / self.excess if self.excess else math.nan

    @classmethod
    def of(
        cls,
        where: Where,
        actual: np.ndarray,
        expected: np.ndarray,
        float32: np.ndarray | None = None,
    ) -> "Measurement":
        """Measures an array that has to be right to the bit, or whose limit is yet to come.

        Args:
            where: step, kind, tensor and replica.
            actual: what the trace holds.
            expected: the float64 reference.
            float32: the float32 reference, where it is another one.
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
            actual: what the trace holds.
            expected: the float64 reference.
            float32: the float32 reference.
            bound: of the error of each element, above 0.
        """
        share = float(np.max(np.abs(np.asarray(actual, np.float64) - expected) / bound))
        return dataclasses.replace(cls.of(where, actual, expected, float32), error=share, limit=1.0)

    @classmethod
    def counted(cls, where: Where, count: int) -> "Measurement":
        """Returns a number of things that are wrong, none of which may be."""
        return cls(*where, float(count), 0.0, 0, float(count), error=float(count), limit=0.0)


def relative_error(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns ‖actual − expected‖ / ‖expected‖; over the smallest number where `expected` is 0."""
    expected = np.asarray(expected, np.float64)
    return _norm(actual - expected) / max(_norm(expected), float(SMALLEST))


def _norm(array: np.ndarray) -> float:
    """Returns the Euclidean norm; without BLAS, whose threads wait for a core in every call."""
    return math.sqrt(np.sum(np.square(array)))


def first_mismatch(measurements: Sequence[Measurement]) -> Measurement | None:
    """Returns what is out of tolerance first, and of what was computed together the worst."""
    mismatches = [m for m in measurements if not m.within_tolerance]
    if not mismatches:
        return None
    first = min(m.order for m in mismatches)
    return max((m for m in mismatches if m.order == first), key=lambda m: m.excess)
