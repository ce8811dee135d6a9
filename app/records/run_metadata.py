"""Defines what a checkpoint says of a training, from which all other records can be written."""

import dataclasses
import statistics
from typing import Any

from app.records.history import EpochRecord, Summary, checked_record
from app.runtime.versions import CPU_KERNELS
from strategies.step_totals import StepTotals

_NO_EXAMPLES = StepTotals(0.0, 0, 0)


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
        num_train_examples: number of training images.
        num_test_examples: number of test images.
        devices: names of the devices of all workers.
        simulated_devices: whether several devices share a processor.
        intra_op_threads: threads of one operation on a CPU; 0 for TensorFlow's default.
        num_replicas: copies of the training step.
        num_shards: shards of each global batch.
        num_copies: copies of the weights.
        all_reduce: algorithm of the all-reduce.
        num_parameters: number of weights of the model.
        versions: versions of the software that affects the results.
    """

    config: dict
    learning_rate: float
    steps_per_epoch: int
    dataset: str
    dataset_sha256: str
    test_part_sha256: str
    num_train_examples: int
    num_test_examples: int
    devices: list
    simulated_devices: bool
    intra_op_threads: int
    num_replicas: int
    num_shards: int
    num_copies: int
    all_reduce: str
    num_parameters: int
    versions: dict

    @property
    def resolved(self) -> dict[str, Any]:
        """The values of options whose default depends on the recipe or the data."""
        return {
            "learning_rate": self.learning_rate,
            "num_train_examples": self.num_train_examples,
        }

    @property
    def identity(self) -> dict[str, Any]:
        """All that two attempts of one training have in common; the kernels may differ."""
        versions = {name: text for name, text in self.versions.items() if name != CPU_KERNELS}
        return {**self.config, "dataset_sha256": self.dataset_sha256, **versions}


@dataclasses.dataclass(frozen=True)
class Progress:
    """The progress of a training.

    Attributes:
        step: optimizer steps since the start.
        epoch_step: optimizer steps of the current epoch, its position in the data.
        totals: sums over the examples of the current epoch.
        epoch_sec: seconds of training in the current epoch.
        statistics_apart: see `EpochRecord`; during the evaluation of the current epoch.
        verified_steps: see `EpochRecord`; of the current epoch.
        mismatches: see `EpochRecord`; of the current epoch.
        verification_sec: see `EpochRecord`; of the current epoch.
        compile_sec: seconds of compilation of the last attempt.
        total_sec: seconds since the start, over all attempts.
        history: the finished epochs.
        changes: changes of flags on resuming, one line each.
    """

    step: int = 0
    epoch_step: int = 0
    totals: StepTotals = _NO_EXAMPLES
    epoch_sec: float = 0.0
    statistics_apart: float = 0.0
    verified_steps: int = 0
    mismatches: int = 0
    verification_sec: float = 0.0
    compile_sec: float = 0.0
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
        totals = StepTotals(*values["totals"])
        if not all(isinstance(number, int | float) for number in totals):
            raise TypeError(f"totals is {totals!r:.80}")
        return checked_record(cls, {**values, "totals": totals, "history": history})

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


def is_finished(metadata: RunMetadata, progress: Progress) -> bool:
    """Returns whether all epochs are trained, evaluated and saved."""
    return progress.epoch == metadata.config["epochs"]


def summarize(metadata: RunMetadata, progress: Progress) -> Summary:
    """Returns the summary of a training that has finished an epoch."""
    history, last = progress.history, progress.history[-1]
    values = {
        **metadata.config,
        **vars(metadata),
        **vars(progress),
        **vars(last),
        "status": "finished" if is_finished(metadata, progress) else "running",
        "command": "train",
        "steps": last.step,
        "best_test_accuracy": max(record.test_accuracy for record in history),
        "epoch_sec": statistics.median(record.epoch_sec for record in history),
        "images_per_sec": statistics.median(record.images_per_sec for record in history),
        "learning_rate": metadata.learning_rate,
        **progress.verified_counts(),
    }
    return Summary(**{field.name: values[field.name] for field in dataclasses.fields(Summary)})
