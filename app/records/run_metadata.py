"""Defines the metadata and the progress of a training in a checkpoint."""

import dataclasses
import statistics
from typing import Any

from app.records.history import EpochRecord, checked_record


@dataclasses.dataclass(frozen=True)
class RunMetadata:
    """Describes what was trained on which data; compared when a run resumes.

    Attributes:
        config: flags that the result depends on, such as model, precision, seed and batch size.
        learning_rate: peak learning rate, from the recipe if no flag sets it.
        steps_per_epoch: batches per epoch.
        dataset: name of the dataset.
        dataset_sha256: hash of all images and labels, in order.
        test_part_sha256: hash of the test images and labels.
        num_devices: devices of all workers.
        num_shards: shards of each global batch.
        num_copies: copies of the weights.
        versions: versions of the software that affects the results.
    """

    config: dict
    learning_rate: float
    steps_per_epoch: int
    dataset: str
    dataset_sha256: str
    test_part_sha256: str
    num_devices: int
    num_shards: int
    num_copies: int
    versions: dict


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a training.

    Attributes:
        step: optimizer steps since the start.
        epoch_step: optimizer steps of the current epoch, its position in the data.
        loss_sum: sum of the losses over the examples of the current epoch.
        correct: number of correct predictions in the current epoch.
        examples: number of examples of the current epoch.
        epoch_sec: seconds of training in the current epoch.
        statistics_apart: see `EpochRecord`; during the evaluation of the current epoch.
        verified_steps: see `EpochRecord`; of the current epoch.
        mismatches: see `EpochRecord`; of the current epoch.
        verification_sec: see `EpochRecord`; of the current epoch.
        total_sec: seconds since the start, over all attempts.
        history: the finished epochs.
        changes: changes of flags on resuming, one line each.
    """

    step: int = 0
    epoch_step: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    examples: int = 0
    epoch_sec: float = 0.0
    statistics_apart: float = 0.0
    verified_steps: int = 0
    mismatches: int = 0
    verification_sec: float = 0.0
    total_sec: float = 0.0
    history: list[EpochRecord] = dataclasses.field(default_factory=list)
    changes: list[str] = dataclasses.field(default_factory=list)

    @classmethod
    def parse(cls, values: dict) -> "Progress":
        """Creates the progress from plain values.

        Raises:
            TypeError: a field is missing, unknown or of another type.
        """
        history = [checked_record(EpochRecord, record) for record in values["history"]]
        return checked_record(cls, {**values, "history": history})

    @property
    def epoch(self) -> int:
        """The number of finished epochs."""
        return len(self.history)

    def verified_counts(self) -> dict[str, int]:
        """Returns the number of verified steps of all epochs, and the number of mismatches."""
        earlier = self.history
        return {
            "verified_steps": self.verified_steps + sum(e.verified_steps for e in earlier),
            "mismatches": self.mismatches + sum(e.mismatches for e in earlier),
        }

    def results(self) -> dict[str, Any]:
        """Returns the fields of the summary that follow from the finished epochs."""
        last = self.history[-1]
        return {
            "steps": last.step,
            "train_loss": last.train_loss,
            "test_loss": last.test_loss,
            "test_accuracy": last.test_accuracy,
            "best_test_accuracy": max(record.test_accuracy for record in self.history),
            "epoch_sec": statistics.median(record.epoch_sec for record in self.history),
            "images_per_sec": statistics.median(record.images_per_sec for record in self.history),
            "weights_sha256": last.weights_sha256,
            "total_sec": self.total_sec,
            "changes": self.changes,
            **self.verified_counts(),
        }
