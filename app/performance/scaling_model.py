"""What a step costs over devices, the work of each device constant: fitted and extrapolated."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from app.performance.all_reduce_model import least_squares
from app.performance.step_time_breakdown import Prediction

# Fewer counts than this leave nothing to check the fit against.
MIN_COUNTS = 3
# In these R (R − 1) chunks are added and as many copied: each device has one of every other device,
# or passes one of each to the next. Devices that share cores work on them one after another.
_PAIRWISE = ("ring", "direct")


@dataclasses.dataclass(frozen=True)
class ScalingModel:
    """time = fixed + each · R + more · log₂ R, or more · R (R − 1) in place of the last term.

    The work of each device is constant. On devices that work at the same time, `each_sec` is what
    an all-reduce adds for each device; on logical devices, which share cores, it includes the
    computation of a shard.

    Attributes:
        fixed_sec: α, whatever the number of devices.
        each_sec: β, for each device.
        more_sec: γ, for each doubling of the number of devices, or for each pair of devices.
        pairwise: whether it is for each pair; see `is_pairwise`.
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
        """Fits all three numbers so that relative errors are small; none is negative.

        Args:
            counts: numbers of devices, at least two different ones.
            secs: of a step, for each of them.
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
        """Predicts the largest count from a fit to the others.

        Args:
            counts: different numbers of devices, at least `MIN_COUNTS`.
            secs: of a step, for each of them.
            pairwise: see `is_pairwise`.

        Raises:
            ValueError: too few counts.
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
    """Returns whether the messages of an all-reduce take a time for each pair of devices.

    Args:
        algorithm: of `strategies.ALL_REDUCE_ALGORITHMS`.
        shared: whether the devices share cores.
    """
    return shared and algorithm in _PAIRWISE


def _terms(num_replicas: int, pairwise: bool) -> tuple[float, float, float]:
    more = num_replicas * (num_replicas - 1) if pairwise else math.log2(num_replicas)
    return 1.0, float(num_replicas), float(more)
