"""All that hypotheses about the first mismatch are tested on."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from app.verification.measurement import Measurement
from app.verification.reference import Arrays, Reference
from app.verification.trace import KINDS_OF_A_SHARD, Trace
from app.verification.trace_checker import find_shards, state_before
from app.verification.verdict import Diagnosis


@dataclasses.dataclass(frozen=True)
class StepContext:
    """A trace, what was measured of it, and the means to compute the expected arrays.

    Attributes:
        trace: the whole training.
        measurements: of all of it.
        batch: returns images and labels of the global batch of a step.
        training_hashes: returns the hashes of all training examples.
        reference64: recomputes what is needed.
    """

    trace: Trace
    measurements: Sequence[Measurement]
    batch: Callable[[int], tuple[np.ndarray, np.ndarray]]
    training_hashes: Callable[[], np.ndarray]
    reference64: Reference

    def start(
        self, mismatch: Measurement
    ) -> tuple[Arrays, np.ndarray, np.ndarray, list[np.ndarray]]:
        """Returns what the step starts from: state, images, labels and shards."""
        images, labels = self.batch(mismatch.step)
        shards, _ = find_shards(self.trace, mismatch.step, images, labels)
        return state_before(self.trace, mismatch.step), images, labels, shards

    def num_items(self, kind: str) -> int:
        """Returns how many shards, or copies of the weights, have arrays of a kind."""
        own = kind in KINDS_OF_A_SHARD
        return self.trace.num_shards if own else self.trace.num_copies

    def wrong_replicas(self, mismatch: Measurement, kind: str, tensor: str) -> list[int]:
        """Returns the replicas whose array is wrong; a trace names those of other bits only."""
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


def name_replicas(replicas: Sequence[int], num_replicas: int) -> str:
    """Returns "every replica" or "replica 0, 2"."""
    if len(replicas) == num_replicas:
        return "every replica" if num_replicas > 1 else "the one replica"
    return "replica " + ", ".join(map(str, replicas))


WHOLE_BATCH_NORM = Diagnosis(
    "whole_batch_norm",
    "BatchNorm normalises over the whole global batch, as one device does, not over each replica's"
    " shard",
)
