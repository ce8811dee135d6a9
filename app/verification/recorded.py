"""Defines the results of `verify`'s processes: recorded trainings and checked traces."""

import dataclasses

from app.verification.straggler import SendTime
from lockstep.trace import About
from lockstep.verdict import Verdict


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A training whose trace is on disk.

    Attributes:
        about: description of its trace.
        devices: devices of all workers.
        simulated_devices: whether logical devices share a processor.
        dataset: name of the dataset.
        dataset_sha256: hash of all images and labels.
        learning_rate: peak learning rate.
        num_train_examples: number of training examples.
        has_batch_norm: whether the model has moving statistics.
        versions: versions of the software that affects the results.
        send_sec: for each step and replica, seconds and seconds of processor time from the start of
            the step until the replica sent its last gradient.
        skipped_steps: steps, from 1, that were skipped because a gradient overflowed in float16.
        diverged_step: the first step, from 1, after which the loss or a variable is not finite; 0
            for none.
    """

    about: About
    devices: list[str]
    simulated_devices: bool
    dataset: str
    dataset_sha256: str
    learning_rate: float
    num_train_examples: int
    has_batch_norm: bool
    versions: dict[str, str]
    send_sec: list[list[SendTime]] = dataclasses.field(default_factory=list)
    skipped_steps: list[int] = dataclasses.field(default_factory=list)
    diverged_step: int = 0

    @property
    def shard_weights(self) -> tuple[int, ...]:
        """Relative sizes of the shards."""
        return tuple(int(shard.weight) for shard in self.about.shards)

    @property
    def replica_weights(self) -> list[int]:
        """Relative sizes of the replicas' parts of a batch."""
        size = len(self.about.shards) // self.about.num_replicas
        weights = self.shard_weights
        return [sum(weights[i : i + size]) for i in range(0, len(weights), size)]

    @property
    def normalised_by(self) -> tuple[int, ...]:
        """The sizes of the parts of a batch that BatchNorm normalises; empty without BatchNorm."""
        if not self.has_batch_norm:
            return ()
        return (1,) if self.about.syncs_batch_norm else self.shard_weights

    def describe(self) -> str:
        """Returns the parts of a batch in words: "2 replicas of 4 micro-batches"."""
        num, size = self.about.num_replicas, len(self.about.shards) // self.about.num_replicas
        replicas = f"{num} replica{'s' if num > 1 else ''}"
        return replicas if size == 1 else f"{replicas} of {size} micro-batches"


@dataclasses.dataclass(frozen=True)
class Checked:
    """The result of checking a trace.

    Attributes:
        verdict: the verdict.
        effect_of_shards: relative difference of the first gradient from that of BatchNorm over the
            whole batch; None if it was not asked for.
    """

    verdict: Verdict
    effect_of_shards: float | None = None
