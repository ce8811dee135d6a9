"""The outer loop: epochs, evaluation, timing, records. Of a strategy it sees but the contract."""

import dataclasses
import math
import pathlib
import platform
import statistics
import time

import keras
import numpy as np
import tensorflow as tf

from app import console
from app.build import restore
from app.config import Config
from app.data.dataset import ImageDataset
from app.data.pipeline import eval_dataset
from app.devices import Devices
from app.errors import CheckpointError, DivergedError
from app.job import Job
from app.proof.drift import Drift, check_replicas
from app.proof.faults import inject, spoil_dataset
from app.proof.probe import probe_exchange
from app.records import checkpoint as checkpoints
from app.records import history as histories
from app.records import plots
from app.records.history import EpochRecord, Summary
from strategies.base import StepTotals, Strategy

EVAL_GLOBAL_BATCH_SIZE = 1000
# Steps go into one compiled call until it takes this long: the bar moves, the host hardly works.
_CALL_SEC = 0.5


class Training:
    """One training: built and tried out; nothing is read from `run_dir` or written there yet.

    Args:
        config: what to train and how.
        devices: where.
        dataset: on what.
        run_dir: the directory of the run, locked.

    Raises:
        ConfigError: the strategy cannot run like this, or the fault not happen.
        ExchangeError: the all-reduce loses or repeats what replicas send.
    """

    def __init__(
        self, config: Config, devices: Devices, dataset: ImageDataset, run_dir: pathlib.Path
    ):
        self._config, self._devices, self._dataset = config, devices, dataset
        self._run_dir = run_dir
        self._job = Job(config, dataset)
        self.steps_per_epoch = self._job.steps_per_epoch
        self.learning_rate = self._job.learning_rate
        self._origin = {
            **{name: getattr(config, name) for name in ("model", "recipe", "seed")},
            "dataset": dataset.name,
            "dataset_sha256": dataset.sha256(),
            "test_part_sha256": dataset.sha256_of_test_part(),
            **({"injected_fault": str(config.fault)} if config.fault else {}),
        }
        self.strategy = self._job.build_strategy(devices)
        probe_exchange(self.strategy)
        if config.fault:
            inject(
                config.fault,
                self.strategy,
                batch_sizes=self._job.batch_sizes(),
                num_steps=self._job.num_steps,
            )
        self._step, self._history, self._earlier_sec = 0, [], 0.0
        self._start = time.monotonic()

    def resume(self) -> None:
        """Goes back to the newest checkpoint, if there is one, and to its history.

        Raises:
            CheckpointError: it is unusable or of another training.
        """
        checkpoint = checkpoints.load_newest_checkpoint(self._run_dir)
        if checkpoint is None:
            return
        changes = [
            f"{name} {checkpoint.origin.get(name)} → {value}"
            for name, value in {"injected_fault": None, **self._origin}.items()
            if checkpoint.origin.get(name) != value
        ]
        if changes:
            raise CheckpointError(
                f"{self._run_dir}: its checkpoint is of another training ({'; '.join(changes)})"
                " — the same is required to go on; restore the data, or use --overwrite"
            )
        restore(self.strategy, checkpoint)
        self._step = checkpoint.step
        history = histories.load_history(self._run_dir)
        self._history = [record for record in history if record.step <= self._step]
        if self._step != len(self._history) * self.steps_per_epoch:
            raise CheckpointError(
                f"{self._run_dir}: checkpoint of step {self._step}, but a history of"
                f" {len(self._history)} epochs of {self.steps_per_epoch} steps — both have to be of"
                " one run; restore the missing file, or use --overwrite"
            )
        summary = histories.load_summary(self._run_dir)
        self._earlier_sec = summary.total_sec if summary else 0.0
        console.say(f"resuming after epoch {len(self._history)}, step {self._step}")
        if summary and summary.num_replicas != self.strategy.num_replicas:
            console.say(
                f"{console.count(summary.num_replicas, 'replica')} before,"
                f" {self.strategy.num_replicas} now: global batch and learning rate stay, so it is"
                " the same training but for rounding and BatchNorm's shards"
            )

    def run(self) -> Summary:
        """Trains the epochs that are left; returns the summary, which is on disk by then.

        Raises:
            DivergedError: the loss is not finite any more.
        """
        dataset, config = self._dataset, self._config
        iterator = self.strategy.distribute(self._batches())
        with console.Progress(config.epochs, self.steps_per_epoch, self._step) as progress:
            compile_sec = _time(lambda: self.strategy.train_steps(iterator, 0))
            while len(self._history) < config.epochs:
                train_totals, epoch_sec = self._train_epoch(iterator, progress)
                progress.evaluating()
                drift = self._check_replicas()
                test_totals = evaluate(self.strategy, dataset)
                self._check_finite(test_totals, "test loss")
                self._history.append(self._record(train_totals, test_totals, epoch_sec, drift))
                self._save(compile_sec)
                progress.epoch(self._history[-1])
        return self._finish()

    def _batches(self):
        """Returns the training set from the next step on, spoiled where that was asked for."""

        def batches(seed):
            return self._job.batches(seed=seed, start_step=self._step)

        seed, fault = self._config.seed, self._config.fault
        if fault is None:
            return batches(seed)
        return spoil_dataset(fault, batches, seed=seed, num_replicas=self.strategy.num_replicas)

    def _check_replicas(self) -> Drift:
        """Stops a training whose replicas are not in step; says once what they keep apart."""
        drift = check_replicas(self.strategy)
        if drift.tensor and not self._history:
            console.say(
                f"replicas hold the same weights, bit for bit; their own statistics are up to"
                f" {drift.absolute:.2g} apart ({drift.tensor}) and are averaged now"
            )
        return drift

    def _train_epoch(self, iterator, progress) -> tuple[StepTotals, float]:
        """Makes the steps of one epoch; returns their totals and the seconds they took."""
        totals, epoch_sec, step_sec = StepTotals(0.0, 0, 0), 0.0, math.inf
        epoch_end = self._step + self.steps_per_epoch
        while self._step < epoch_end:
            num_steps = self._config.steps_per_call or max(1, int(_CALL_SEC / step_sec))
            num_steps = min(num_steps, epoch_end - self._step)
            start = time.monotonic()
            call_totals = self.strategy.train_steps(iterator, num_steps)
            call_sec = time.monotonic() - start
            self._step += num_steps
            self._check_finite(call_totals, "training loss")
            totals, epoch_sec, step_sec = (
                totals.plus(call_totals),
                epoch_sec + call_sec,
                call_sec / num_steps,
            )
            progress.step(self._step, totals, call_totals.examples / call_sec)
        return totals, epoch_sec

    def _check_finite(self, totals: StepTotals, what: str) -> None:
        if not math.isfinite(totals.loss_sum):
            raise DivergedError(
                f"{what} {totals.loss} at step {self._step} with learning rate"
                f" {self.learning_rate:g} — a finite loss is required; use a smaller"
                " --learning_rate"
            )

    def _record(
        self, train: StepTotals, test: StepTotals, epoch_sec: float, drift: Drift
    ) -> EpochRecord:
        return EpochRecord(
            epoch=len(self._history) + 1,
            step=self._step,
            train_loss=train.loss,
            train_accuracy=train.accuracy,
            test_loss=test.loss,
            test_accuracy=test.accuracy,
            epoch_sec=epoch_sec,
            images_per_sec=train.examples / epoch_sec,
            statistics_apart=drift.absolute,
            injected_fault=str(self._config.fault or ""),
        )

    def _save(self, compile_sec: float) -> None:
        """Writes what the epoch left; the checkpoint when all that it stands for is there."""
        state = self.strategy.state()
        for name, array in state.items():
            if not np.all(np.isfinite(array)):
                raise DivergedError(
                    f"{name} is not finite at step {self._step} with learning rate"
                    f" {self.learning_rate:g} — finite weights are required; use a smaller"
                    " --learning_rate"
                )
        summary = self._summarise(compile_sec, checkpoints.weights_sha256(state))
        histories.write_history(self._run_dir, self._history)
        histories.write_summary(self._run_dir, summary)
        checkpoints.save_checkpoint(
            self._run_dir, checkpoints.Checkpoint(self._step, state, self._origin)
        )
        plots.plot_accuracy([self._run_dir], self._run_dir)

    def _finish(self) -> Summary:
        """Marks the run as finished, last of all: whatever was cut off before is made good."""
        summary = histories.load_summary(self._run_dir)
        summary = dataclasses.replace(summary, status="finished")
        plots.plot_accuracy([self._run_dir], self._run_dir)
        histories.write_summary(self._run_dir, summary)
        return summary

    def _summarise(self, compile_sec: float, weights_sha256: str) -> Summary:
        config, last = self._config, self._history[-1]
        return Summary(
            status="running",
            command=config.command,
            strategy=self.strategy.name,
            num_replicas=self.strategy.num_replicas,
            devices=self.strategy.devices,
            simulated_devices=self._devices.simulated,
            intra_op_threads=self._devices.intra_op_threads,
            all_reduce=self.strategy.all_reduce,
            model=config.model,
            num_parameters=self.strategy.model.count_params(),
            dataset=self._dataset.name,
            dataset_sha256=self._origin["dataset_sha256"],
            recipe=config.recipe,
            global_batch_size=config.global_batch_size,
            learning_rate=self.learning_rate,
            precision=config.precision,
            jit_compile=config.jit_compile,
            seed=config.seed,
            epochs=config.epochs,
            steps=self._step,
            num_train_examples=len(self._dataset.train_images),
            num_test_examples=len(self._dataset.test_images),
            train_loss=last.train_loss,
            test_loss=last.test_loss,
            test_accuracy=last.test_accuracy,
            best_test_accuracy=max(record.test_accuracy for record in self._history),
            epoch_sec=statistics.median(record.epoch_sec for record in self._history),
            images_per_sec=statistics.median(record.images_per_sec for record in self._history),
            compile_sec=compile_sec,
            total_sec=self._earlier_sec + time.monotonic() - self._start,
            weights_sha256=weights_sha256,
            versions=versions(),
            injected_fault=str(config.fault or ""),
        )


def evaluate(strategy: Strategy, dataset: ImageDataset) -> StepTotals:
    """Returns the totals over the whole test set, each image seen once.

    Raises:
        RuntimeError: the strategy saw another number of images.
    """
    test_set = eval_dataset(
        dataset.test_images, dataset.test_labels, global_batch_size=EVAL_GLOBAL_BATCH_SIZE
    )
    totals = strategy.evaluate(test_set)
    if totals.examples != len(dataset.test_images):
        raise RuntimeError(
            f"evaluated {totals.examples} images instead of {len(dataset.test_images)}"
        )
    return totals


def versions() -> dict[str, str]:
    """Returns the versions of everything that numbers depend on."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
    }


def _time(call) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start
