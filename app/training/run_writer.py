"""Writes the results of a run: its checkpoints, and the records derived from them."""

import dataclasses
import pathlib

from app.data.dataset import ImageDataset
from app.devices.device_setup import Devices
from app.options import Config
from app.records.checkpoint import Checkpoint, CheckpointSearchResult, save_checkpoint
from app.records.event_file import EventFile
from app.records.files import discard, io_errors_as, remove
from app.records.history import (
    FIGURE_FILES,
    HISTORY_FILE,
    SUMMARY_FILE,
    EpochRecord,
    Summary,
    write_history,
    write_summary,
)
from app.records.run_metadata import Progress, RunMetadata
from app.runtime import console
from strategies.base import StepTotals, Strategy


class RunWriter:
    """Writes the files of one run.

    A checkpoint contains the complete training. History, summary and figure are written from its
    progress, also when a training resumes, so that they never differ from it.

    Args:
        run_dir: the run directory, locked.
        template: a summary with all values that do not change during a run.
    """

    def __init__(self, run_dir: pathlib.Path, template: Summary) -> None:
        self._run_dir, self._summary = run_dir, template
        self._events = EventFile(run_dir)

    def begin(self, resumed: CheckpointSearchResult | None) -> None:
        """Starts the records of this attempt, from the checkpoint if it resumes from one.

        Raises:
            DiskFullError, OutputError: a file cannot be written.
        """
        if resumed is None:
            self._events.start(0, first_dropped_step=0)
            return
        progress, metadata = resumed.checkpoint.progress, resumed.checkpoint.metadata
        discard([path for path, _ in resumed.damaged])
        # The evaluation of an epoch is repeated if the checkpoint precedes it.
        is_evaluated = progress.epoch_step < metadata.steps_per_epoch
        self._events.start(progress.step, first_dropped_step=progress.step + is_evaluated)
        self._write_records(progress)

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

    def save(self, checkpoint: Checkpoint, *, compile_sec: float) -> None:
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
        console.log(f"Saved checkpoint {path.name}")
        if is_epoch_end:
            self._summary = dataclasses.replace(self._summary, compile_sec=compile_sec)
            self._write_records(progress)

    def mismatch(self, progress: Progress) -> None:
        """Adds the verified steps of the current epoch to the summary, if an epoch is finished."""
        if progress.history:
            self._write_summary(progress)

    def finish(self) -> Summary:
        """Marks the run as finished and returns its summary."""
        self._summary = dataclasses.replace(self._summary, status="finished")
        write_summary(self._run_dir, self._summary)
        return self._summary

    def _write_records(self, progress: Progress) -> None:
        """Writes history, summary and figure; removes them if no epoch is finished."""
        if progress.history:
            write_history(self._run_dir, progress.history)
            self._write_summary(progress)
            from app.report.accuracy_plot import plot_accuracy  # Imports matplotlib: 0.3 s.

            plot_accuracy([self._run_dir], self._run_dir)
            return
        # Records of an earlier attempt describe epochs that this training has lost.
        for name in (SUMMARY_FILE, HISTORY_FILE, *FIGURE_FILES):
            with io_errors_as(self._run_dir / name):
                remove(self._run_dir / name)

    def _write_summary(self, progress: Progress) -> None:
        self._summary = dataclasses.replace(self._summary, **progress.results())
        write_summary(self._run_dir, self._summary)


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


def summary_template(
    config: Config,
    devices: Devices,
    dataset: ImageDataset,
    strategy: Strategy,
    metadata: RunMetadata,
) -> Summary:
    """Returns a summary with all values that do not change during a run, without results."""
    results = {field.name: 0.0 for field in dataclasses.fields(Summary) if field.type is float}
    return Summary(
        **{
            **results,
            "status": "running",
            "command": config.command,
            "strategy": strategy.name,
            "num_replicas": strategy.num_replicas,
            "num_shards": strategy.num_shards,
            "num_copies": strategy.num_copies,
            "devices": strategy.devices,
            "simulated_devices": devices.simulated,
            "intra_op_threads": devices.intra_op_threads,
            "all_reduce": strategy.algorithm,
            "model": config.training.model,
            "num_parameters": strategy.model.count_params(),
            "dataset": metadata.dataset,
            "dataset_sha256": metadata.dataset_sha256,
            "recipe": config.training.recipe,
            "global_batch_size": config.training.global_batch_size,
            "learning_rate": metadata.learning_rate,
            "precision": config.training.precision,
            "jit_compile": config.training.jit_compile,
            "seed": config.training.seed,
            "epochs": config.training.epochs,
            "steps": 0,
            "num_train_examples": dataset.num_train_examples,
            "num_test_examples": dataset.num_test_examples,
            "weights_sha256": "",
            "versions": metadata.versions,
            "injected_fault": str(config.verification.fault or ""),
        }
    )
