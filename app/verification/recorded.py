"""Defines the results of `verify`'s processes: recorded trainings and checked traces."""

import dataclasses

from app.verification.measurement import Measurement
from app.verification.split import Split
from app.verification.straggler import SendTime
from app.verification.verdict import Diagnosis


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A training whose trace is on disk.

    Attributes:
        devices: devices of all workers.
        num_replicas: number of parts of a batch that are trained in parallel.
        num_shards: number of parts of a batch with their own gradient and BatchNorm statistics.
        num_copies: number of copies of the weights.
        syncs_batch_norm: whether BatchNorm was configured to normalise over the whole batch.
        shard_weights: relative sizes of the shards.
        simulated_devices: whether logical devices share a processor.
        dataset: name of the dataset.
        dataset_sha256: hash of all images and labels.
        learning_rate: peak learning rate.
        num_train_examples: number of training examples.
        has_batch_norm: whether the model has moving statistics.
        is_reference: whether the training is the reference itself, which need not be checked.
        effect_of_shards: relative difference of the first gradient from that of BatchNorm over the
            whole batch; None if not computed.
        send_sec: for each step and replica, seconds and seconds of processor time from the start of
            the step until the replica sent its last gradient.
        versions: versions of the software that affects the results.
        skipped_steps: steps that were skipped because a gradient overflowed in float16.
        own_findings: findings of a framework's recording without a comparison, which explain a
            mismatch that has no other explanation.
    """

    devices: list[str]
    num_replicas: int
    num_shards: int
    num_copies: int
    syncs_batch_norm: bool
    shard_weights: list[int]
    simulated_devices: bool
    dataset: str
    dataset_sha256: str
    learning_rate: float
    num_train_examples: int
    has_batch_norm: bool
    is_reference: bool
    effect_of_shards: float | None
    send_sec: list[list[SendTime]]
    versions: dict[str, str]
    skipped_steps: list[int] = dataclasses.field(default_factory=list)
    own_findings: list[Diagnosis] = dataclasses.field(default_factory=list)

    @property
    def replica_weights(self) -> list[int]:
        """Relative sizes of the replicas' parts of a batch."""
        size = self.num_shards // self.num_replicas
        return [sum(self.shard_weights[i : i + size]) for i in range(0, self.num_shards, size)]

    @property
    def split(self) -> Split:
        """The split of the training, equal to that of its trace."""
        return Split(self.num_replicas, self.num_shards, self.num_copies, self.syncs_batch_norm)

    @property
    def normalised_by(self) -> tuple[int, ...]:
        """The sizes of the parts of a batch that BatchNorm normalises; empty without BatchNorm."""
        if not self.has_batch_norm:
            return ()
        return (1,) if self.syncs_batch_norm else tuple(self.shard_weights)


@dataclasses.dataclass(frozen=True)
class Checked:
    """The result of checking a trace.

    Attributes:
        measurements: measurements of every array of every step, in the order of computation.
        first_mismatch: first measurement out of tolerance; None without one.
        diagnosis: explanation of the first mismatch; None without one.
    """

    measurements: list[Measurement]
    first_mismatch: Measurement | None
    diagnosis: Diagnosis | None
