"""Restores, broadcasts, checks and saves the state of a training."""

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Sequence

import numpy as np

from app.options import Config
from app.records.checkpoint import Checkpoint, weights_sha256
from app.records.history import EpochRecord
from app.records.run_metadata import Progress, RunMetadata
from app.runtime import console
from app.runtime.errors import DivergedError
from app.training.optimizers import last_learning_rate
from app.training.replica_divergence import check_replica_divergence
from app.training.resume import resumed_progress
from app.training.run_writer import RunWriter
from app.training.strategy_builder import restore
from strategies.base import StepTotals, Strategy
from strategies.copies import State
from strategies.workers import Workers

# Default interval between checkpoints within an epoch, without a number of steps.
_CHECKPOINT_SEC = 300.0


class CheckpointSchedule:
    """Tracks the last checkpoint of a training and when the next one is due.

    The end of an epoch is always saved with its evaluation.

    Args:
        every_steps: steps between checkpoints; None or 0 for an interval of time.
        steps_per_epoch: batches per epoch.
    """

    def __init__(self, every_steps: int | None, steps_per_epoch: int) -> None:
        self._every_steps, self._steps_per_epoch = every_steps, steps_per_epoch
        self._saved = 0, 0  # The step and the epoch of the last checkpoint.
        self._last_save = time.monotonic()

    @property
    def saved_step(self) -> int:
        """The step of the last checkpoint; 0 without one."""
        return self._saved[0]

    def mark_saved(self, progress: Progress) -> None:
        """Records that a checkpoint with this progress is on disk."""
        self._saved, self._last_save = (progress.step, progress.epoch), time.monotonic()

    def is_saved(self, progress: Progress) -> bool:
        """Returns whether the last checkpoint has this progress."""
        return (progress.step, progress.epoch) == self._saved

    def is_due(self, progress: Progress) -> bool:
        """Returns whether to save within the epoch."""
        if progress.epoch_step == self._steps_per_epoch:
            return False
        if self._every_steps:
            return progress.step % self._every_steps == 0
        return time.monotonic() - self._last_save >= _CHECKPOINT_SEC

    def num_steps_before_next(self, progress: Progress) -> int:
        """Returns the number of steps before the next checkpoint or the end of the epoch."""
        to_epoch_end = self._steps_per_epoch - progress.epoch_step
        if not self._every_steps:
            return to_epoch_end
        return min(to_epoch_end, self._every_steps - progress.step % self._every_steps)


class TrainingState:
    """The progress of a training, and the weights and the optimizer state of its strategy.

    Args:
        config: options of the training.
        strategy: a built strategy.
        metadata: metadata of the training, for checkpoints.

    Attributes:
        progress: progress of the training.
        checkpoints: the last checkpoint, and when the next one is due.
    """

    def __init__(self, config: Config, strategy: Strategy, metadata: RunMetadata) -> None:
        self._config, self._strategy, self._metadata = config, strategy, metadata
        self.progress, self._start = Progress(), time.monotonic()
        self.checkpoints = CheckpointSchedule(
            config.output.checkpoint_every, metadata.steps_per_epoch
        )

    def restore(self, found: Checkpoint, run_dir: pathlib.Path, *, has_schedule: bool) -> None:
        """Restores the checkpoint from which a run resumes.

        Args:
            found: the checkpoint.
            run_dir: the run directory, for messages.
            has_schedule: whether the learning rate depends on the number of epochs.

        Raises:
            CheckpointError: it is of another training.
        """
        self.progress = resumed_progress(
            found, run_dir, self._config, self._metadata, has_schedule=has_schedule
        )
        self.checkpoints.mark_saved(self.progress)
        restore(self._strategy, found)

    def broadcast(self, workers: Workers, resumed: Checkpoint | None) -> None:
        """Broadcasts the chief's state, restored from a checkpoint or not, to every worker."""
        text = workers.broadcast(json.dumps(dataclasses.asdict(self.progress)).encode())
        self.progress = Progress.parse(json.loads(text))
        self.checkpoints.mark_saved(self.progress)
        own = resumed.per_shard_statistics if resumed else []
        self._strategy.states.broadcast(own)

    def add_steps(self, num_steps: int, totals: StepTotals, *, call_sec: float) -> None:
        """Adds the steps of a compiled call to the progress."""
        progress = self.progress
        self.progress = dataclasses.replace(
            progress,
            step=progress.step + num_steps,
            epoch_step=progress.epoch_step + num_steps,
            totals=progress.totals.plus(totals),
            epoch_sec=progress.epoch_sec + call_sec,
        )

    def add_compilation(self, sec: float) -> None:
        """Sets the seconds of compilation of this attempt."""
        self.progress = dataclasses.replace(self.progress, compile_sec=sec)

    def add_verification(self, sec: float, *, verified: int = 0, wrong: int = 0) -> None:
        """Adds the verification of a step to the progress of the epoch.

        Args:
            sec: seconds of the verification.
            verified: number of checked steps.
            wrong: number of mismatches.
        """
        progress = self.progress
        self.progress = dataclasses.replace(
            progress,
            verified_steps=progress.verified_steps + verified,
            mismatches=progress.mismatches + wrong,
            verification_sec=progress.verification_sec + sec,
        )

    def roll_back(
        self,
        progress: Progress,
        state: State | None,
        per_shard_statistics: Sequence[Sequence[np.ndarray]],
    ) -> bool:
        """Rolls back every copy of every worker to an earlier state; returns False without one.

        The counts of verified steps stay, because rolling back does not undo a mismatch.

        Args:
            progress: progress at that state.
            state: on the chief, the state; None for no state.
            per_shard_statistics: on the chief, BatchNorm statistics.
        """
        strategy = self._strategy
        (is_given,) = strategy.workers.all_reduce_max(state is not None)
        if not is_given:
            return False
        if state is not None:
            strategy.load_state(state)
            strategy.states.load_per_shard_statistics(per_shard_statistics)
        if strategy.workers.count > 1:
            strategy.states.broadcast(per_shard_statistics)
        self.progress = dataclasses.replace(
            progress,
            verified_steps=self.progress.verified_steps,
            mismatches=self.progress.mismatches,
        )
        return True

    def check_finite(self, totals: StepTotals, description: str) -> None:
        """Checks a loss; `description` names it, for example "training loss".

        Raises:
            DivergedError: it is not finite.
        """
        if not math.isfinite(totals.loss_sum):
            name = _first_not_finite(self._strategy.state())
            cause = f"{name} is not finite" if name else "all weights are finite"
            raise self._diverged(f"{description} {totals.loss}, {cause}")

    def check_replica_divergence(self, *, shown: bool) -> None:
        """Checks that the copies of the weights are equal; records the difference of statistics.

        Args:
            shown: whether to print the difference at the end of the first epoch.

        Raises:
            ReplicaDivergenceError: replicas hold different weights.
        """
        divergence = check_replica_divergence(self._strategy)
        if divergence.tensor and not self.progress.history and shown:
            console.say(
                "Weights are bitwise identical on all replicas. BatchNorm statistics, of different"
                f" shards, differ by up to {divergence.absolute:.2g}: their average is used"
            )
        apart = max(divergence.absolute, self.progress.statistics_apart)
        self.progress = dataclasses.replace(self.progress, statistics_apart=apart)

    def finish_epoch(self, test: StepTotals, *, evaluation_sec: float) -> None:
        """Adds the current epoch to the finished ones, after its last step and its evaluation.

        Args:
            test: totals over the test set.
            evaluation_sec: seconds of the evaluation.
        """
        progress, train = self.progress, self.progress.totals
        record = EpochRecord(
            epoch=progress.epoch + 1,
            step=progress.step,
            train_loss=train.loss,
            train_accuracy=train.accuracy,
            test_loss=test.loss,
            test_accuracy=test.accuracy,
            epoch_sec=progress.epoch_sec,
            images_per_sec=train.examples / progress.epoch_sec,
            statistics_apart=progress.statistics_apart,
            injected_fault=str(self._config.verification.fault or ""),
            learning_rate=last_learning_rate(self._strategy.optimizer),
            evaluation_sec=evaluation_sec,
            verified_steps=progress.verified_steps,
            mismatches=progress.mismatches,
            verification_sec=progress.verification_sec,
        )
        self.progress = Progress(
            step=progress.step,
            compile_sec=progress.compile_sec,
            total_sec=progress.total_sec,
            history=[*progress.history, record],
            changes=progress.changes,
        )

    def save(self, writer: RunWriter | None) -> bool:
        """Saves a checkpoint; returns False if the last one has this state already.

        Args:
            writer: the writer; None on a worker that only checks the state.

        Raises:
            DivergedError: a weight or an optimizer variable is not finite.
            ReplicaDivergenceError: replicas hold different weights.
            DiskFullError, OutputError: the checkpoint cannot be written.
        """
        if self.checkpoints.is_saved(self.progress):
            return False
        if self.progress.epoch_step:  # The state of the first copy is saved for all copies.
            check_replica_divergence(self._strategy)
        state, own = self._strategy.state(), self._strategy.states.per_shard_statistics()
        if name := _first_not_finite(state):
            raise self._diverged(f"{name} is not finite")
        now = time.monotonic()
        total_sec = self.progress.total_sec + now - self._start
        self.progress = dataclasses.replace(self.progress, total_sec=total_sec)
        self._start = now
        if not self.progress.epoch_step:
            self._add_hash(weights_sha256(state))
        if writer:
            checkpoint = Checkpoint(self._metadata, self.progress, state, own)
            writer.save(checkpoint)
        self.checkpoints.mark_saved(self.progress)
        return True

    def _add_hash(self, sha256: str) -> None:
        """Adds the hash of the weights to the record of the epoch that has just finished."""
        *earlier, last = self.progress.history
        last = dataclasses.replace(last, weights_sha256=sha256)
        self.progress = dataclasses.replace(self.progress, history=[*earlier, last])

    def _diverged(self, problem: str) -> DivergedError:
        saved, rate = self.checkpoints.saved_step, self._metadata.learning_rate
        kept = f"; the checkpoint of step {saved} is kept" if saved else ""
        return DivergedError(
            f"{problem} at step {self.progress.step} with learning rate {rate:g}; use a smaller"
            f" --learning_rate{kept}"
        )


def _first_not_finite(state: State) -> str | None:
    """Returns the name of the first array that holds a number that is not finite."""
    names = (name for name, array in state.items() if not np.all(np.isfinite(array)))
    return next(names, None)
