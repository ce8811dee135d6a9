"""Provides the data on which hypotheses about the first mismatch are tested."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from app.verification.measurement import Measurement
from app.verification.reference import Arrays, Forward, Reference, ShardResult
from app.verification.split import KINDS_OF_A_SHARD, Split
from app.verification.step_start import find_shards, rows_of_units, state_before
from app.verification.trace import Trace
from app.verification.verdict import Diagnosis


@dataclasses.dataclass(frozen=True)
class StepContext:
    """A trace, its measurements, and the means to compute the expected arrays.

    Attributes:
        trace: the trace of the training.
        measurements: all measurements of the trace.
        batch: returns images and labels of the global batch of a step.
        training_hashes: returns the hashes of all training examples.
        reference64: float64 reference.
    """

    trace: Trace
    measurements: Sequence[Measurement]
    batch: Callable[[int], tuple[np.ndarray, np.ndarray]]
    training_hashes: Callable[[], np.ndarray]
    reference64: Reference

    def start(
        self, mismatch: Measurement
    ) -> tuple[Arrays, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Returns the start of the step: state, images, labels and shards."""
        images, labels = self.batch(mismatch.step)
        shards, _ = find_shards(self.trace, mismatch.step, images, labels)
        return state_before(self.trace, mismatch.step), images, labels, shards

    @property
    def split(self) -> Split:
        """The numbers of the trace, and the names of its parts."""
        return self.trace.split

    def compute(
        self,
        mismatch: Measurement,
        *,
        state: Mapping[str, np.ndarray] | None = None,
        forward: Forward | None = None,
        by_unit: bool = True,
    ) -> list[ShardResult]:
        """Computes loss and gradients of each unit of the step, in float64.

        Args:
            mismatch: a mismatch of the step.
            state: state to start from; None for the state before the step.
            forward: see `Reference.gradients`.
            by_unit: compute the units that are compared, else each shard separately.
        """
        before, images, labels, shards = self.start(mismatch)
        rows = rows_of_units(self.trace, shards) if by_unit else shards
        return self.reference64.gradients(state or before, images, labels, rows, forward=forward)

    def gradients_of(self, mismatch: Measurement, unit_id: int) -> Arrays:
        """Returns the gradients of a unit, summed over its shards."""
        return {
            tensor: self.trace.read_unit(mismatch.step, "gradients", unit_id, tensor)
            for tensor in self.trace.tensors(mismatch.step, "gradients")
        }

    def num_items(self, kind: str) -> int:
        """Returns the number of shards, or copies of the weights, with arrays of a kind."""
        own = kind in KINDS_OF_A_SHARD
        return self.trace.num_shards if own else self.trace.num_copies

    def wrong_replicas(self, mismatch: Measurement, kind: str, tensor: str) -> list[int]:
        """Returns the replicas whose array is wrong, also those identical to replica 0."""
        measured_wrong = {
            m.replica_id for m in self.measurements
            if m.order == mismatch.order and m.tensor == mismatch.tensor and not m.within_tolerance
        }  # fmt: skip
        named = self.trace.replicas(mismatch.step, kind, tensor)
        replicas = range(self.num_items(kind))
        return [r for r in replicas if (r if r in named else 0) in measured_wrong]

    def arrays(self, mismatch: Measurement, kind: str, replica_id: int) -> Arrays:
        """Returns all tensors of a kind that a replica held in the step."""
        tensors = self.trace.tensors(mismatch.step, kind)
        return {tensor: self.read(mismatch, kind, replica_id, tensor) for tensor in tensors}

    def read(self, mismatch: Measurement, kind: str, replica_id: int, tensor: str) -> np.ndarray:
        """Returns one tensor that a replica held in the step."""
        return self.trace.read(mismatch.step, kind, replica_id, tensor)


WHOLE_BATCH_NORM = Diagnosis(
    "whole_batch_norm",
    "BatchNorm normalises over the whole global batch, as one device does, not over"
    " each shard separately",
)
