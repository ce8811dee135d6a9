"""Models the cost of a step over devices at constant work per device, and extrapolates it."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from app.performance.all_reduce_model import least_squares
from app.performance.step_time_breakdown import Prediction

# The fit cannot be checked with fewer counts.
MIN_COUNTS = 3
# In these algorithms R (R − 1) chunks are added and as many copied: each device sends one chunk to
# each other device, or R − 1 chunks to the next. Devices that share cores process them in turn.
_PAIRWISE = ("ring", "direct")


@dataclasses.dataclass(frozen=True)
class ScalingModel:
    """Models time = fixed + each · R + more · log₂ R, or more · R (R − 1) as the last term.

    The work per device is constant. On parallel devices, `each_sec` is the all-reduce's cost per
    device; on logical devices, which share cores, it includes the computation of a shard.

    Attributes:
        fixed_sec: α, independent of the number of devices.
        each_sec: β, per device.
        more_sec: γ, per doubling of the number of devices, or per pair of devices.
        pairwise: whether γ is per pair; see `is_pairwise`.
    """

    fixed_sec: float
    each_sec: float
    more_sec: float
    pairwise: bool = False

    def sec(self, num_replicas: int) -> float:
        """Predicts the time of a step."""
        numbers = self.fixed_sec, self.each_sec, self.more_sec
        return float(np.dot(numbers, _terms(num_replicas, self.pairwise)))

    @classmethod
    def fit(
        cls, counts: Sequence[int], secs: Sequence[float], *, pairwise: bool = False
    ) -> "ScalingModel":
        """Fits all three parameters to small relative errors; none is negative.

        Args:
            counts: numbers of devices, at least two different ones.
            secs: seconds per step, for each number.
            pairwise: see `is_pairwise`.

        Raises:
            ValueError: fewer than two different counts.
        """
        if len(set(counts)) < 2:
            raise ValueError(f"needs two different numbers of devices, got {list(counts)}")
        terms = np.array([_terms(r, pairwise) for r in counts])
        rows = terms / np.asarray(secs, np.float64)[:, np.newaxis]
        fixed, each, more = least_squares(rows, np.ones(len(rows)))
        return cls(fixed, each, more, pairwise)

    @classmethod
    def hold_out(
        cls, counts: Sequence[int], secs: Sequence[float], *, pairwise: bool = False
    ) -> Prediction:
        """Predicts the time for the largest count from a fit to the other counts.

        Args:
            counts: different numbers of devices, at least `MIN_COUNTS`.
            secs: seconds per step, for each number.
            pairwise: see `is_pairwise`.

        Raises:
            ValueError: there are too few counts.
        """
        if len(set(counts)) < MIN_COUNTS:
            raise ValueError(
                f"needs {MIN_COUNTS} different numbers of devices to hold out one, got"
                f" {list(counts)}"
            )
        *fitted, (largest, measured_sec) = sorted(zip(counts, secs, strict=True))
        model = cls.fit(*zip(*fitted, strict=True), pairwise=pairwise)
        return Prediction(largest, model.sec(largest), measured_sec, held_out=True)

    def __str__(self) -> str:
        terms = {
            "": self.fixed_sec,
            " · R": self.each_sec,
            " · R (R − 1)" if self.pairwise else " · log₂ R": self.more_sec,
        }
        used = [f"{1e3 * sec:.3g} ms{name}" for name, sec in terms.items() if sec]
        return " + ".join(used) or "0 ms"


def is_pairwise(algorithm: str, *, shared: bool) -> bool:
    """Returns whether the messages of an all-reduce take time per pair of devices.

    Args:
        algorithm: one of `strategies.ALL_REDUCE_ALGORITHMS`.
        shared: whether the devices share cores.
    """
    return shared and algorithm in _PAIRWISE


def _terms(num_replicas: int, pairwise: bool) -> tuple[float, float, float]:
    more = num_replicas * (num_replicas - 1) if pairwise else math.log2(num_replicas)
    return 1.0, float(num_replicas), float(more)
