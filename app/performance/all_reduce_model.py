"""Models the cost of an all-reduce by latency and bandwidth, and extrapolates to more devices."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np

# Algorithm → for R replicas: number of consecutive steps, and the bytes through the busiest
# connection over a replica's bytes. See the docstrings in `strategies/collectives.py`.
_COSTS = {
    "reduce_to_one": lambda r: (2, 2 * (r - 1)),
    "tree": lambda r: (2 * math.ceil(math.log2(r)), 2 * math.ceil(math.log2(r))),
    "ring": lambda r: (2 * (r - 1), 2 * (r - 1) / r),
    "direct": lambda r: (2, 2 * (r - 1) / r),
}
_ROUNDING = 1e-12
_COSTS["nccl"] = _COSTS["ring"]  # There is no formula for TensorFlow's hierarchical all-reduce.


def all_reduce_cost(algorithm: str, num_replicas: int) -> tuple[int, float]:
    """Returns the cost of one all-reduce, independent of the devices.

    Returns:
        Number of consecutive messages; and bytes through the busiest connection over the bytes that
        a replica holds.
    """
    return _COSTS[algorithm](num_replicas) if num_replicas > 1 else (0, 0.0)


@dataclasses.dataclass(frozen=True)
class AllReduceTime:
    """The time of one all-reduce without other work.

    Attributes:
        num_replicas: R.
        size_bytes: bytes of each replica.
        sec: duration.
    """

    num_replicas: int
    size_bytes: int
    sec: float

    @property
    def bus_bytes_per_sec(self) -> float:
        """Bytes per second times 2 (R − 1) / R, comparable between numbers of replicas.

        The load of a connection at least, for any algorithm; "busbw" in NCCL's tests.
        """
        return self.size_bytes * 2 * (self.num_replicas - 1) / self.num_replicas / self.sec


@dataclasses.dataclass(frozen=True)
class AllReduceModel:
    """Models time = steps · latency + bytes through the busiest connection / bandwidth.

    Attributes:
        algorithm: the measured algorithm.
        shared: whether all connections share one medium, the memory of a processor; then all bytes
            pass through it, 2 (R − 1) times a replica's bytes, for any algorithm.
        latency_sec: latency of a step.
        sec_per_byte: seconds per byte on the busiest connection.
    """

    algorithm: str
    shared: bool
    latency_sec: float
    sec_per_byte: float

    def sec(self, num_replicas: int, size_bytes: float) -> float:
        """Predicts the time of one all-reduce."""
        steps, passes = _cost(self.algorithm, num_replicas, self.shared)
        return steps * self.latency_sec + passes * size_bytes * self.sec_per_byte

    @classmethod
    def fit(
        cls, algorithm: str, times: Sequence[AllReduceTime], *, shared: bool = False
    ) -> "AllReduceModel":
        """Fits both parameters to small relative errors; neither is negative."""
        costs = [_cost(algorithm, t.num_replicas, shared) for t in times]
        rows = np.array(
            [
                [steps / t.sec, passes * t.size_bytes / t.sec]
                for (steps, passes), t in zip(costs, times, strict=True)
            ]
        )
        latency, sec_per_byte = least_squares(rows, np.ones(len(rows)))
        return cls(algorithm, shared, latency, sec_per_byte)


def _cost(algorithm: str, num_replicas: int, shared: bool) -> tuple[float, float]:
    steps, passes = all_reduce_cost(algorithm, num_replicas)
    return steps, 2 * (num_replicas - 1) if shared else passes


@dataclasses.dataclass(frozen=True)
class LinearCost:
    """Models time = fixed + each · examples for a replica's own computation.

    Attributes:
        fixed_sec: seconds independent of the shard.
        example_sec: seconds per example.
    """

    fixed_sec: float
    example_sec: float

    def sec(self, num_examples: float) -> float:
        """Predicts the time of a shard."""
        return self.fixed_sec + self.example_sec * num_examples

    @classmethod
    def fit(cls, num_examples: Sequence[float], secs: Sequence[float]) -> "LinearCost":
        """Fits both parameters to small relative errors; neither is negative."""
        measured = np.asarray(secs, np.float64)
        rows = np.stack([1 / measured, np.asarray(num_examples) / measured], axis=1)
        return cls(*least_squares(rows, np.ones(len(rows))))


def least_squares(rows: np.ndarray, targets: np.ndarray) -> list[float]:
    """Returns the non-negative numbers for which rows · numbers is nearest to targets.

    The solution is an ordinary fit with some numbers fixed at 0; all choices are tried. Among
    equally good choices, the one with most zeros is returned.
    """
    total = float(targets @ targets)
    best, least = np.zeros(rows.shape[1]), total
    for used in sorted(itertools.product([False, True], repeat=rows.shape[1]), key=sum):
        numbers = np.zeros(rows.shape[1])
        numbers[list(used)] = np.linalg.lstsq(rows[:, used], targets, rcond=None)[0]
        error = float(np.sum((rows @ numbers - targets) ** 2))
        if np.all(numbers >= 0) and error < least - _ROUNDING * total:
            best, least = numbers, error
    return best.tolist()
