"""Computes the batch statistics that BatchNorm added to its moving statistics in a step."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from app.verification.recordings.recorded_step import STATISTIC, RecordedStep
from app.verification.recordings.step_pair import StepPair
from app.verification.recordings.trace_arrays import EPS, TINY, norm

_CLOSE = 1e-4


@dataclasses.dataclass(frozen=True)
class MovingStatistic:
    """A moving statistic in a step of two recordings, in float64.

    Attributes:
        name: name in the first recording.
        is_variance: whether it is a variance, not a mean.
        before: values before the step in both recordings.
        after: values after the step in both recordings.
        shares: weight with which each recording adds the statistic of the batch, 0.1 for a momentum
            of 0.1 in PyTorch and 0.9 in Keras; None if its layer does not record it.
    """

    name: str
    is_variance: bool
    before: np.ndarray
    after: tuple[np.ndarray, np.ndarray]
    shares: tuple[float, float] | None

    @property
    def changes(self) -> tuple[np.ndarray, np.ndarray]:
        """The changes in both recordings."""
        return self.after[0] - self.before, self.after[1] - self.before

    @property
    def of_batch(self) -> tuple[np.ndarray, np.ndarray]:
        """The statistic of the batch in both recordings."""
        assert self.shares is not None
        first, second = (c / s for c, s in zip(self.changes, self.shares, strict=True))
        return self.before + first, self.before + second

    @property
    def rounding(self) -> float:
        """Norm of the difference of the batch statistics that rounding can cause."""
        assert self.shares is not None
        sizes = max(map(norm, (self.before, *self.after)))
        return 8 * EPS * sizes / min(self.shares) + TINY

    def has_equal_batch(self) -> bool:
        """Returns whether both recordings add the same statistic of the batch."""
        first, second = self.of_batch
        return norm(second - first) <= _CLOSE * norm(first) + self.rounding


def moving_statistics(pair: StepPair) -> list[MovingStatistic]:
    """Returns the statistics that both recordings have, in the order of the first."""
    before, _ = pair.states("before")
    first, second = pair.states("after")
    found = []
    for name in pair.first.state("after", 0, STATISTIC):
        if name not in before or name not in second or before[name].dtype.kind != "f":
            continue
        after = first[name].astype(np.float64), second[name].astype(np.float64)
        shares = _share(pair.first, name), _share(pair.second, pair.in_second(name))
        both = (shares[0], shares[1]) if shares[0] and shares[1] else None
        is_variance = "var" in name.replace("/", ".").split(".")[-1].lower()
        found.append(
            MovingStatistic(name, is_variance, before[name].astype(np.float64), after, both)
        )
    return found


def _share(step: RecordedStep, name: str) -> float | None:
    layers = [layer for layer in step.trace.layers if "BatchNorm" in str(layer.get("class"))]
    own = [layer for layer in layers if name in layer.get("weights", ())]
    return _share_of_layers(own or layers)


def _share_of_layers(layers: Sequence[Mapping[str, Any]]) -> float | None:
    for layer in layers:
        if isinstance(momentum := layer.get("momentum"), float):
            share = 1 - momentum if layer["class"] == "BatchNormalization" else momentum
            return share if share > 0 else None
    return None
