"""Writes the results of a run: its checkpoints, and the records derived from them."""

import pathlib

from app.records.checkpoint import Checkpoint, save_checkpoint
from app.records.event_file import EventFile
from app.records.files import remove
from app.records.history import (
    FIGURE_FILES,
    HISTORY_FILE,
    SUMMARY_FILE,
    EpochRecord,
    is_written,
    write_history,
)
from app.records.run_metadata import Progress, RunMetadata, summarize
from app.runtime import console
from strategies.step_totals import StepTotals


class RunWriter:
    """Writes the files of one attempt of a run; the constructor starts them.

    A checkpoint contains the complete training. History, summary and figure are written from it,
    also when a training resumes, so that they never differ from it.

    Args:
        run_dir: the run directory, locked.
        metadata: metadata of the training.
        progress: progress of the training.
        resumed: the checkpoint from which it resumes; None from scratch.

    Raises:
        DiskFullError, OutputError: a file cannot be written.
    """

    def __init__(
        self,
        run_dir: pathlib.Path,
        metadata: RunMetadata,
        progress: Progress,
        resumed: Checkpoint | None = None,
    ) -> None:
        self._run_dir, self._metadata = run_dir, metadata
        for path, _ in resumed.damaged if resumed else ():
            remove(path)
        # The evaluation of an epoch is repeated if the checkpoint precedes it.
        is_evaluated = progress.epoch_step < metadata.steps_per_epoch
        self._events = EventFile(
            run_dir, progress.step, first_dropped_step=progress.step + is_evaluated
        )
        if resumed:
            write_records(run_dir, metadata, progress)

    def steps(
        self,
        progress: Progress,
        totals: StepTotals,
        *,
        images_per_sec: float,
        learning_rate: float,
    ) -> None:
        """Writes the scalars of a call's steps for TensorBoard.

        Args:
            progress: progress after the last step, before its verification.
            totals: totals over the examples of the steps.
            images_per_sec: throughput of the steps.
            learning_rate: learning rate of the last step.
        """
        scalars = {
            "steps/loss": totals.loss,
            "steps/accuracy": totals.accuracy,
            "steps/images_per_sec": images_per_sec,
            "steps/learning_rate": learning_rate,
        }
        counts = progress.verified_counts()
        if counts["verified_steps"]:
            scalars |= {f"steps/{name}": count for name, count in counts.items()}
        self._events.add(progress.step, scalars)

    def save(self, checkpoint: Checkpoint) -> None:
        """Saves a checkpoint and, at the end of an epoch, the records of the epoch.

        Raises:
            DiskFullError, OutputError: a file cannot be written; existing files are unchanged.
        """
        progress = checkpoint.progress
        is_epoch_end = bool(progress.history) and not progress.epoch_step
        if is_epoch_end:
            self._events.add(progress.step, _scalars(progress.history[-1]))
        self._events.sync()
        path = save_checkpoint(self._run_dir, checkpoint)
        console.log(f"Saved checkpoint {path.stem}")
        if is_epoch_end:
            write_records(self._run_dir, self._metadata, progress)

    def mismatch(self, progress: Progress) -> None:
        """Adds the verified steps of the current epoch to the summary, if an epoch is finished."""
        if progress.history:
            write_history(self._run_dir, progress.history, summarize(self._metadata, progress))


def write_records(run_dir: pathlib.Path, metadata: RunMetadata, progress: Progress) -> None:
    """Writes history, summary and figure, unless they are there; removes those of no epoch.

    Raises:
        DiskFullError, OutputError: a file cannot be written.
    """
    history = progress.history
    if not history:  # Records of an earlier attempt describe epochs that this training has lost.
        for name in (SUMMARY_FILE, HISTORY_FILE, *FIGURE_FILES):
            remove(run_dir / name)
        return
    summary = summarize(metadata, progress)
    has_figure = all((run_dir / name).exists() for name in FIGURE_FILES)
    if has_figure and is_written(run_dir, history, summary):  # The summary is written last.
        return
    from app.report.accuracy_plot import plot_accuracy  # Imports matplotlib: 0.3 s.

    plot_accuracy({summary.strategy: (summary, history)}, run_dir)
    write_history(run_dir, history, summary)


def _scalars(record: EpochRecord) -> dict[str, float]:
    """Returns the scalars of an epoch for TensorBoard."""
    return {
        "epochs/train_loss": record.train_loss,
        "epochs/test_loss": record.test_loss,
        "epochs/train_accuracy": record.train_accuracy,
        "epochs/test_accuracy": record.test_accuracy,
        "epochs/images_per_sec": record.images_per_sec,
        "time/training_sec": record.epoch_sec,
        "time/evaluation_sec": record.evaluation_sec,
    }
