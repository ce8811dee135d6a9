"""What a checkpoint tells of its training: what is trained on what, and how far it is."""

import dataclasses
import itertools
import math

from app.records.history import EpochRecord, checked_record


@dataclasses.dataclass(frozen=True)
class RunMetadata:
    """What was trained on what. A run that resumes compares it with its own.

    Attributes:
        config: the flags that a result depends on: model, precision, seed, recipe, batch and so on.
        learning_rate: the peak, the recipe's own where no flag gave one.
        steps_per_epoch: batches of an epoch.
        dataset: name of the images.
        dataset_sha256: of all of them, in order.
        test_part_sha256: of the test part.
        num_devices: over all workers.
        num_shards: parts of each global batch.
        num_copies: copies of the weights.
        versions: of everything that numbers depend on.
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
    """How far a training is.

    Attributes:
        step: optimizer steps made since the start.
        epoch_step: how many of them in the epoch under way, which is its position in the data.
        loss_sum: over the examples of the epoch under way.
        correct: likewise.
        examples: likewise.
        epoch_sec: of training in the epoch under way.
        statistics_apart: see `EpochRecord`, where the epoch under way is being evaluated.
        verified_steps: see `EpochRecord`; of the epoch under way.
        mismatches: likewise.
        verification_sec: likewise.
        total_sec: since the start, in all attempts.
        history: the epochs that are finished.
        changes: what was changed on the way, a line each.
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
    def parse(cls, values: dict, steps_per_epoch: int) -> "Progress":
        """Returns the progress that plain values describe.

        Raises:
            TypeError, ValueError, OverflowError: no training can be there.
        """
        history = [checked_record(EpochRecord, record) for record in values["history"]]
        progress = checked_record(cls, {**values, "history": history})
        if not 0 <= progress.epoch_step <= min(progress.step, steps_per_epoch):
            raise ValueError(f"step {progress.step}, of the epoch {progress.epoch_step}")
        if [record.epoch for record in history] != list(range(1, len(history) + 1)):
            raise ValueError("epochs that do not follow one another")
        steps = [0, *(record.step for record in history), progress.step + 1]
        if any(after <= before for before, after in itertools.pairwise(steps)):
            raise ValueError("epochs whose steps do not rise")
        losses, numbers = [progress.loss_sum], [progress.epoch_sec, progress.total_sec]
        for record in history:
            for name, value in dataclasses.asdict(record).items():
                if isinstance(value, int | float):  # A loss may be negative.
                    (losses if name.endswith("_loss") else numbers).append(value)
        if not all(math.isfinite(number) for number in losses) or not all(
            math.isfinite(number) and number >= 0 for number in numbers
        ):
            raise ValueError("losses, accuracies or times that are no finite numbers")
        if progress.epoch_step and min(progress.examples, progress.epoch_sec) <= 0:
            raise ValueError(f"{progress.epoch_step} steps over {progress.examples} examples")
        return progress

    @property
    def epoch(self) -> int:
        """How many epochs are finished."""
        return len(self.history)

    @property
    def best_epoch(self) -> EpochRecord | None:
        """The first of those with the highest test accuracy; without any, the least test loss."""
        return max(self.history, key=lambda record: record.rank, default=None)
