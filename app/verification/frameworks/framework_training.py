"""Trains all epochs with another framework, and writes a run directory.

The directory has a history, a summary, a figure and a checkpoint like that of a strategy, so that
`report` and `evaluate` can read it.
"""

import dataclasses
import json
import pathlib
import statistics
from typing import Any

import numpy as np

from app.options import Config
from app.options.rules import num_framework_replicas
from app.records.checkpoint import (
    Checkpoint,
    find_newest_checkpoint,
    save_checkpoint,
    weights_sha256,
)
from app.records.history import (
    EpochRecord,
    Summary,
    checked_record,
    load_required_summary,
    load_summary,
    write_history,
    write_summary,
)
from app.records.run_directory import load_run_config, open_log, open_run_directory
from app.records.run_metadata import Progress
from app.runtime import console
from app.runtime.errors import DataError, reason_of
from app.verification.frameworks.framework_files import TrainingFiles
from app.verification.frameworks.framework_program import FRAMEWORKS, run_program

_FINISHED = "finished"


def train_with_framework(
    name: str,
    python: str,
    config: Config,
    files: TrainingFiles,
    own_run: pathlib.Path,
    run_dir: pathlib.Path,
) -> None:
    """Trains with a framework, unless the run is already finished.

    Args:
        name: name of the framework, a key of `FRAMEWORKS`.
        python: interpreter with the framework.
        config: options of the comparison.
        files: files that the framework trains from.
        own_run: finished run of a strategy with the same training.
        run_dir: output directory of the run.

    Raises:
        DataError: the program did not write its results.
        DeviceError: the program failed.
    """
    fields = {**load_run_config(own_run), "strategy": name}
    with open_run_directory(run_dir, fields) as run_directory:
        if not config.output.overwrite:
            run_directory.check_same_run()
            summary = load_summary(run_dir)
            if summary and summary.status == _FINISHED and summary.epochs == config.training.epochs:
                console.say(f"{run_dir} is already finished; this is its result")
                console.say(summary.last_line())
                return
        run_directory.start(overwrite=True)  # The program cannot resume.
        open_log(run_dir)
        folder = files.start.parent
        written = {"results": folder / "results.json", "weights": folder / "end.npz"}
        run_program(
            name,
            python,
            config.for_training(name),
            files.recorded.learning_rate,
            {
                "start": files.start,
                "batches": files.batches,
                **written,
            },
            f"--epochs={config.training.epochs}",
            num_replicas=num_framework_replicas(config),
            on_line=console.say,
        )
        run = _Run(name, num_framework_replicas(config), own_run, **written)
        run.write(run_dir, run_directory.config)
        console.say(load_required_summary(run_dir).last_line())


class _Run:
    """The results of a program, in the form of a run of a strategy.

    Args:
        name: name of the framework.
        num_replicas: number of replicas of its training.
        own_run: run of a strategy with the same training.
        results: measurements of the program.
        weights: final weights and statistics.
    """

    def __init__(
        self,
        name: str,
        num_replicas: int,
        own_run: pathlib.Path,
        results: pathlib.Path,
        weights: pathlib.Path,
    ):
        self._name, self._num_replicas = name, num_replicas
        self._summary = load_required_summary(own_run)
        found = find_newest_checkpoint(own_run)
        assert found is not None  # The run is finished.
        self._own = found.checkpoint
        try:
            self._results: dict[str, Any] = json.loads(results.read_text(encoding="utf-8"))
            self._history = [self._record(*each) for each in enumerate(self._results["epochs"], 1)]
            self._state = self._load_state(weights)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise DataError(
                f"{name}: did not write its results and weights ({reason_of(error)})"
            ) from error

    def _record(self, epoch: int, values: dict[str, float]) -> EpochRecord:
        own = self._own.progress.history[epoch - 1]
        return checked_record(
            EpochRecord,
            {
                **values,
                "epoch": epoch,
                "step": own.step,
                "images_per_sec": self._summary.num_train_examples / values["epoch_sec"],
                "learning_rate": own.learning_rate,
            },
        )

    def _load_state(self, weights: pathlib.Path) -> dict[str, np.ndarray]:
        """Returns the state of the strategy with the framework's weights and statistics."""
        with np.load(weights, allow_pickle=False) as arrays:
            state = {
                name: arrays[name.removeprefix("model/")] if name.startswith("model/") else array
                for name, array in self._own.state.items()
            }
        for name, array in self._own.state.items():
            if (state[name].shape, state[name].dtype) != (array.shape, array.dtype):
                raise ValueError(f"{name} has shape {state[name].shape}, not {array.shape}")
        return state

    def write(self, run_dir: pathlib.Path, config: dict[str, Any]) -> None:
        """Writes checkpoint, history, figure and, last, the summary."""
        from app.report.accuracy_plot import plot_accuracy

        own, last = self._own, self._history[-1]
        num_shards = 1 if FRAMEWORKS[self._name].syncs_batch_norm else self._num_replicas
        total_sec = sum(each.epoch_sec + each.evaluation_sec for each in self._history)
        metadata = dataclasses.replace(
            own.metadata,
            config=config,
            num_devices=self._num_replicas,
            num_shards=num_shards,
            num_copies=self._num_replicas,
            versions={**own.metadata.versions, **self._results["versions"]},
        )
        progress = Progress(last.step, total_sec=total_sec, history=self._history)
        save_checkpoint(run_dir, Checkpoint(metadata, progress, self._state))
        write_history(run_dir, self._history)
        summary = self._finished_summary(metadata.versions, num_shards, total_sec)
        write_summary(run_dir, summary)
        plot_accuracy([run_dir], run_dir)

    def _finished_summary(
        self, versions: dict[str, str], num_shards: int, total_sec: float
    ) -> Summary:
        last, title = self._history[-1], FRAMEWORKS[self._name].title
        return dataclasses.replace(
            self._summary,
            status=_FINISHED,
            strategy=self._name,
            num_replicas=self._num_replicas,
            num_shards=num_shards,
            num_copies=self._num_replicas,
            devices=[f"{title} {i}" for i in range(self._num_replicas)],
            simulated_devices=self._num_replicas > 1,
            intra_op_threads=0,
            all_reduce=title,
            jit_compile=FRAMEWORKS[self._name].package == "jax",
            steps=last.step,
            train_loss=last.train_loss,
            test_loss=last.test_loss,
            test_accuracy=last.test_accuracy,
            best_test_accuracy=max(each.test_accuracy for each in self._history),
            epoch_sec=statistics.median(each.epoch_sec for each in self._history),
            images_per_sec=statistics.median(each.images_per_sec for each in self._history),
            compile_sec=0.0,
            total_sec=total_sec,
            weights_sha256=weights_sha256(self._state),
            versions=versions,
            changes=[],
        )
