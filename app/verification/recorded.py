"""What the processes of `verify` hand back: trainings that are recorded, and traces checked."""

import dataclasses

from app.verification.measurement import Measurement
from app.verification.split import Split
from app.verification.straggler import SendTime
from app.verification.verdict import Diagnosis


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A training whose trace is on disk.

    Attributes:
        devices: of all workers.
        num_replicas: parts of a batch that were trained on at the same time.
        num_shards: parts of a batch with a gradient, and BatchNorm statistics, of their own.
        num_copies: copies of the weights.
        syncs_batch_norm: whether BatchNorm was to normalise over the whole batch.
        shard_weights: sizes of the shards in proportion to each other.
        simulated_devices: logical devices that share a processor.
        dataset: which images.
        dataset_sha256: of all of them.
        learning_rate: the peak.
        num_train_examples: how many.
        has_batch_norm: whether the model keeps moving statistics.
        is_reference: whether the reference itself was trained, which need not be checked.
        effect_of_shards: how far the first gradient is from that of BatchNorm over the whole batch,
            relative; None where nobody asked.
        send_sec: for each step and replica, from the start of the step until it sent its last
            gradient: seconds, and seconds of processor time.
        versions: of what numbers depend on.
        own_findings: of a recording by another framework, what is wrong without a comparison; it
            explains a mismatch that has no other explanation.
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
    own_findings: list[Diagnosis] = dataclasses.field(default_factory=list)

    @property
    def replica_weights(self) -> list[int]:
        """Sizes of the replicas' parts of a batch in proportion to each other."""
        size = self.num_shards // self.num_replicas
        return [sum(self.shard_weights[i : i + size]) for i in range(0, self.num_shards, size)]

    @property
    def split(self) -> Split:
        """The numbers of the training, as those of its trace."""
        return Split(self.num_replicas, self.num_shards, self.num_copies, self.syncs_batch_norm)

    @property
    def normalised_by(self) -> tuple[int, ...]:
        """What BatchNorm makes part of the training: the parts of a batch that it normalises."""
        if not self.has_batch_norm:
            return ()
        return (1,) if self.syncs_batch_norm else tuple(self.shard_weights)


@dataclasses.dataclass(frozen=True)
class Checked:
    """What the check of a trace found.

    Attributes:
        measurements: of every array of every step, in the order in which they were computed.
        first_mismatch: the first one out of tolerance, None where there is none.
        diagnosis: why, None likewise.
    """

    measurements: list[Measurement]
    first_mismatch: Measurement | None
    diagnosis: Diagnosis | None
