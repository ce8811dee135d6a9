"""Writes the results of a run: its checkpoints first, then the records derived from them."""

import dataclasses
import math
import pathlib
import statistics
import time
from typing import Any

from app.config import TrainConfig
from app.devices.device_setup import Devices
from app.records import history as histories
from app.records.checkpoint import Checkpoint, save_checkpoint, weights_sha256
from app.records.checkpoint_search import quarantine
from app.records.event_file import EventFile
from app.records.files import io_errors_as
from app.records.history import SUMMARY_FILE, EpochRecord, Summary
from app.records.run_log import RunLog
from app.records.run_metadata import Progress, RunMetadata
from app.report import accuracy_plot
from app.training.resume import Resumed
from app.training.training_data import TrainingData
from strategies.base import StepTotals, Strategy


class TrainingWriter:
    """Receives the results of a training; this class writes nothing.

    A worker other than the chief uses it as it is.
    """

    def begin(self, metadata: RunMetadata) -> None:
        """Called once before the first step, with the metadata of the training."""

    def resume(self, resumed: Resumed) -> None:
        """Called after `begin` if the training resumes from a checkpoint."""

    def steps(
        self,
        progress: Progress,
        totals: StepTotals,
        *,
        images_per_sec: float,
        learning_rate: float,
    ) -> None:
        """Called after each compiled call, with the progress after its last step."""

    def save(self, checkpoint: Checkpoint, *, compile_sec: float) -> None:
        """Called with each state to save."""

    def mismatch(self, progress: Progress) -> None:
        """Called if a verified step ends the training, with the remaining progress."""


class RunWriter(TrainingWriter):
    """Writes the files of one run.

    A checkpoint contains the complete training. History, summary and figure are derived from it, so
    that the next attempt completes whatever an interruption left out.

    Args:
        run_dir: the run directory, locked.
        log: log of the run.
        template: a summary with all values that do not change during a run.
    """

    def __init__(self, run_dir: pathlib.Path, log: RunLog, template: Summary) -> None:
        self._run_dir, self._log, self._summary = run_dir, log, template
        self._events, self._saving_sec = EventFile(run_dir), 0.0

    def begin(self, metadata: RunMetadata) -> None:
        """Logs the metadata of the training."""
        summary = self._summary
        self._log.start(versions=metadata.versions, command=summary.command)
        self._log.event(
            "config",
            config=metadata.config,
            num_replicas=summary.num_replicas,
            devices=summary.devices,
            simulated_devices=summary.simulated_devices,
            steps_per_epoch=metadata.steps_per_epoch,
        )
        self._log.event(
            "data",
            name=summary.dataset,
            sha256=summary.dataset_sha256,
            num_train_examples=summary.num_train_examples,
            num_test_examples=summary.num_test_examples,
        )

    def resume(self, resumed: Resumed) -> None:
        """Logs the step from which the training resumes; adapts the records to the checkpoint."""
        progress = resumed.checkpoint.progress
        self._log.event(
            "resume",
            step=progress.step,
            epoch=progress.epoch,
            damaged=[path.name for path, _ in resumed.found.damaged],
            changes=progress.changes,
        )
        for path, _ in resumed.found.damaged:
            quarantine(path)
        self._events.resume(
            progress.step, {record.step: _scalars(record) for record in progress.history}
        )
        histories.write_history(self._run_dir, progress.history)
        if not progress.epoch_step and progress.history:
            self._write_records(resumed.checkpoint, compile_sec=0.0)
        elif resumed.found.damaged:  # They may contain an epoch that is lost.
            for name in (SUMMARY_FILE, "accuracy.png", "accuracy.svg"):
                with io_errors_as(self._run_dir / name):
                    (self._run_dir / name).unlink(missing_ok=True)

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
            "steps/images_per_sec": images_per_sec,
            "steps/learning_rate": learning_rate,
        }
        if not self._summary.case:  # The correct predictions of a case's step are not counted.
            scalars["steps/accuracy"] = totals.accuracy
        if (counts := _verified_counts(progress))["verified_steps"]:
            scalars |= {f"steps/{name}": count for name, count in counts.items()}
        self._events.add(progress.step, scalars)

    def save(self, checkpoint: Checkpoint, *, compile_sec: float) -> None:
        """Saves a checkpoint and, at the end of an epoch, the records of the epoch.

        Raises:
            DiskFullError, OutputError: a file cannot be written; existing files are unchanged.
        """
        progress, start = checkpoint.progress, time.monotonic()
        self._events.sync()
        save_checkpoint(self._run_dir, checkpoint)
        self._saving_sec += time.monotonic() - start
        if progress.history and not progress.epoch_step:
            histories.write_history(self._run_dir, progress.history)
            self._write_records(checkpoint, compile_sec=compile_sec)
            last = progress.history[-1]
            names = ("epoch", "step", "train_loss", "test_accuracy", "epoch_sec")
            self._log.event("epoch", **{name: getattr(last, name) for name in names})
            self._events.add(last.step, _scalars(last) | {"time/saving_sec": self._saving_sec})
            self._saving_sec = 0.0
        self._log.event("checkpoint", step=progress.step, epoch=progress.epoch)

    def mismatch(self, progress: Progress) -> None:
        """Adds the verified steps of the current epoch to the summary, if it exists."""
        summary = histories.load_summary(self._run_dir)
        if summary:
            histories.write_summary(
                self._run_dir, dataclasses.replace(summary, **_verified_counts(progress))
            )

    def finish(self) -> Summary:
        """Marks the run as finished and returns its summary."""
        self._summary = dataclasses.replace(self._summary, status="finished")
        histories.write_summary(self._run_dir, self._summary)
        return self._summary

    def _write_records(self, checkpoint: Checkpoint, *, compile_sec: float) -> None:
        """Writes summary and figure at the end of an epoch."""
        progress = checkpoint.progress
        history, last = progress.history, progress.history[-1]
        accuracies = [r.test_accuracy for r in history if r.test_accuracy is not None]
        self._summary = dataclasses.replace(
            self._summary,
            steps=progress.step,
            train_loss=last.train_loss,
            test_loss=last.test_loss,
            test_accuracy=last.test_accuracy,
            best_test_accuracy=max(accuracies, default=None),
            test_metrics=last.test_metrics,
            epoch_sec=statistics.median(record.epoch_sec for record in history),
            images_per_sec=statistics.median(record.images_per_sec for record in history),
            compile_sec=compile_sec,
            total_sec=progress.total_sec,
            weights_sha256=weights_sha256(checkpoint.state),
            changes=progress.changes,
            **_verified_counts(progress),
        )
        histories.write_summary(self._run_dir, self._summary)
        accuracy_plot.plot_accuracy([self._run_dir], self._run_dir)


def _verified_counts(progress: Progress) -> dict[str, Any]:
    """Returns the number of verified steps of all epochs, and the number of mismatches."""
    epochs = [*progress.history, progress]
    return {
        name: sum(getattr(epoch, name) for epoch in epochs)
        for name in ("verified_steps", "mismatches")
    }


def _scalars(record: EpochRecord) -> dict[str, float]:
    """Returns the scalars of an epoch for TensorBoard."""
    scalars = {
        "epochs/train_loss": record.train_loss,
        "epochs/test_loss": record.test_loss,
        "epochs/train_accuracy": record.train_accuracy,
        "epochs/test_accuracy": record.test_accuracy,
        "epochs/images_per_sec": record.images_per_sec,
        "time/training_sec": record.epoch_sec,
        "time/evaluation_sec": record.evaluation_sec,
        **{f"metrics/test_{name}": value for name, value in record.test_metrics.items()},
    }
    return {name: value for name, value in scalars.items() if value is not None}


def create_run_writer(
    run_dir: pathlib.Path | None,
    log: RunLog,
    config: TrainConfig,
    devices: Devices,
    dataset: TrainingData,
    strategy: Strategy,
    metadata: RunMetadata,
) -> RunWriter:
    """Creates the writer of a run; arguments after `log` are those of `summary_template`.

    Raises:
        ValueError: there is no run directory.
    """
    if run_dir is None:
        raise ValueError("a log needs a run directory; a worker without one calls assist")
    template = summary_template(config, devices, dataset, strategy, metadata)
    return RunWriter(run_dir, log, template)


def summary_template(
    config: TrainConfig,
    devices: Devices,
    dataset: TrainingData,
    strategy: Strategy,
    metadata: RunMetadata,
) -> Summary:
    """Returns a summary with all values that do not change during a run, without results."""
    results = {field.name: math.nan for field in dataclasses.fields(Summary) if field.type is float}
    accuracies = {"test_accuracy": None, "best_test_accuracy": None}
    is_case = config.case is not None
    return Summary(
        **{
            **results,
            **accuracies,
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
            "model": strategy.model.name if is_case else config.model,
            "num_parameters": strategy.model.count_params(),
            "dataset": metadata.dataset,
            "dataset_sha256": metadata.dataset_sha256,
            "recipe": "" if is_case else config.recipe,
            "global_batch_size": config.global_batch_size,
            "learning_rate": metadata.learning_rate,
            "precision": strategy.model.dtype_policy.name if is_case else config.precision,
            "jit_compile": config.jit_compile,
            "seed": config.seed,
            "epochs": config.epochs,
            "steps": 0,
            "num_train_examples": dataset.num_train_examples,
            "num_test_examples": dataset.num_test_examples,
            "weights_sha256": "",
            "versions": metadata.versions,
            "injected_fault": str(config.fault or ""),
            "case": config.case_path.name if is_case else "",
            "evaluates_training_data": dataset.evaluates_training_data,
        }
    )
