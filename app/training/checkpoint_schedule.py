"""Decides when a training saves a checkpoint within an epoch."""

import time

from app.records.run_metadata import Progress

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
        self._saved = 0, 0  # Step and epoch of the last checkpoint.
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
