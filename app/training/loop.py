"""Runs a training: steps, verification, checkpoints, evaluation."""

import dataclasses
import itertools
import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from app import console, signals
from app.data.batches import eval_dataset
from app.data.fashion_mnist import ImageDataset
from app.errors import DivergedError, Terminated
from app.progress import TrainingProgress
from app.records import files
from app.records.checkpoint import Checkpoint, check_resumable, save_checkpoint, weights_sha256
from app.records.history import EpochRecord, EventWriter, finished, is_complete, write_history
from app.report.plots import plot_accuracy
from app.training.build import TrainingRun, restore
from app.training.checks import check_all_reduce, check_copies
from app.training.recipes import last_learning_rate
from strategies.base import BatchIterator, StepTotals, Strategy
from strategies.state import State

# The number of steps of a compiled call grows until it takes this long. Workers synchronise after
# each call, which takes several round trips through the network.
_CALL_SEC, _CALL_SEC_OF_WORKERS = 0.5, 2.0
_EVAL_BATCH_SIZE = 1000  # Over all replicas.
_CHECKPOINT_SEC = 300.0  # Between checkpoints within an epoch, without --checkpoint_every.


class TrainingLoop:
    """Runs one training. The constructor tests the all-reduce, and writes nothing to `run_dir`.

    With several workers, each of them creates and runs a loop at the same time.

    Args:
        run: the training.
        run_dir: the run directory, locked; None for a worker other than the chief.
        resumed: the checkpoint from which the run resumes; None to start from scratch.
        on_progress: called whenever there is progress.
        check_step: trains a step, given its number from 1, and compares it with one device;
            returns its totals, and whether it was verified.
    """

    def __init__(
        self,
        run: TrainingRun,
        run_dir: pathlib.Path | None,
        resumed: Checkpoint | None = None,
        on_progress: Callable[[], None] = lambda: None,
        check_step: Callable[[BatchIterator, int], tuple[StepTotals, bool]] | None = None,
    ) -> None:
        self.training, self._strategy, self._workers = run, run.strategy, run.strategy.workers
        self._run_dir, self._on_progress, self._check_step = run_dir, on_progress, check_step
        self._step_sec, self._last_save = math.inf, time.monotonic()
        self.metadata, self.epochs = run.metadata(), list[EpochRecord]()
        self._damaged = [path for path, _ in resumed.damaged] if resumed else []
        check_all_reduce(self._strategy)
        if run_dir and resumed:
            scheduled = run.recipe.warmup is not None
            check_resumable(resumed, run_dir, self.metadata, has_schedule=scheduled)
            restore(self._strategy, resumed)
            self.epochs = list(resumed.epochs)
        if self._workers.count > 1:
            text = json.dumps([dataclasses.asdict(record) for record in self.epochs])
            per_epoch = json.loads(self._workers.broadcast(text.encode()))
            self.epochs = [EpochRecord(**values) for values in per_epoch]
            own = resumed.per_shard_statistics if resumed else ()
            self._strategy.states.broadcast(own if len(own) == self._strategy.num_shards else ())
        self._saved = self._position()
        self._on_progress()

    def run(self) -> list[EpochRecord]:
        """Trains the remaining steps; returns the epochs, which have been saved.

        Saves before it raises KeyboardInterrupt or Terminated for a signal; raises DivergedError,
        MismatchError for a verified step, and ReplicaDivergenceError without saving.
        """
        run, step = self.training, self._current().step
        if self._run_dir:
            for path in self._damaged:
                files.remove(path)
            write_history(self._run_dir, self.metadata, self.epochs, plot_accuracy)
            self._events = EventWriter(self._run_dir, step)
        self._bar = TrainingProgress(
            run.config.training.epochs, run.steps_per_epoch, step, shown=self._workers.is_chief
        )
        with self._bar, signals.deferred():
            try:
                if not is_complete(self.metadata, self.epochs):
                    self._bar.building()
                    # An attribute, because deleting an iterator of `tf.distribute` can take 30 s.
                    self._iterator = self._strategy.distribute(run.batches(step))
                    self._strategy.train_steps(self._iterator, 0)  # Compiles.
                while not is_complete(self.metadata, self.epochs):
                    while self._current().epoch_step < run.steps_per_epoch:
                        self._train_call()
                        self._save_if_due()
                    self._end_epoch()
                    self._synchronize()
            except (KeyboardInterrupt, Terminated):
                self._save()
                self._leave()
                raise
        self._leave()
        return self.epochs

    def _current(self) -> EpochRecord:
        """Returns the record of the running epoch."""
        if self.epochs and not self.epochs[-1].is_finished:
            return self.epochs[-1]
        step = self.epochs[-1].step if self.epochs else 0
        return EpochRecord(len(self.epochs) + 1, step, 0, 0.0, 0, 0, 0.0)

    def _position(self) -> tuple[int, int]:
        """Returns the number of steps and of finished epochs."""
        return self._current().step, len(finished(self.epochs))

    def _train_call(self) -> None:
        """Trains some steps in one compiled call, and adds them to the record of the epoch."""
        record, start = self._current(), time.monotonic()
        num_steps, is_verified = self._num_steps_of_next_call(record)
        if is_verified and self._check_step:
            totals, is_verified = self._check_step(self._iterator, record.step + 1)
            call_sec = 0.0  # Verification is not training time.
        else:
            totals = self._strategy.train_steps(self._iterator, num_steps)
            call_sec = time.monotonic() - start
            self._step_sec = call_sec / num_steps
        self._check_finite(totals, "training loss", record.step + num_steps)
        record = dataclasses.replace(
            record,
            step=record.step + num_steps,
            epoch_step=record.epoch_step + num_steps,
            loss_sum=record.loss_sum + totals.loss_sum,
            correct=record.correct + totals.correct,
            examples=record.examples + totals.examples,
            epoch_sec=record.epoch_sec + call_sec,
            learning_rate=last_learning_rate(self._strategy.optimizer),
            verified_steps=record.verified_steps + is_verified,
        )
        self.epochs = [*finished(self.epochs), record]
        scalars = {"loss": totals.loss, "accuracy": totals.accuracy}
        scalars["learning_rate"] = record.learning_rate
        if call_sec:
            scalars["images_per_sec"] = totals.examples / call_sec
        speed = scalars.get("images_per_sec", 0.0)
        self._bar.step(record.step, record.train_loss, record.train_accuracy, speed)
        if self._run_dir:
            self._events.add(record.step, "steps", scalars)

    def _num_steps_of_next_call(self, record: EpochRecord) -> tuple[int, bool]:
        """Returns the number of steps of the next compiled call, and whether it is verified."""
        call_sec = _CALL_SEC_OF_WORKERS if self._workers.count > 1 else _CALL_SEC
        num_steps = self.training.steps_per_epoch - record.epoch_step
        num_steps = min(num_steps, max(1, int(call_sec / self._step_sec)))
        if every := self.training.config.output.checkpoint_every:
            num_steps = min(num_steps, every - record.step % every)
        if every := self.training.config.verification.verify_every:
            if record.step == 0 or (record.step + 1) % every == 0:
                return 1, True
            num_steps = min(num_steps, every - 1 - record.step % every)
        return num_steps, False

    def _end_epoch(self) -> None:
        """Evaluates and saves the epoch whose steps have been trained."""
        record, start, num_batches = self._current(), time.monotonic(), itertools.count(1)
        num_examples = self.training.dataset.num_test_examples
        self._bar.evaluating(0, num_examples)

        def on_batch() -> None:
            done = min(next(num_batches) * _EVAL_BATCH_SIZE, num_examples)
            self._bar.evaluating(done, num_examples)
            self._synchronize()

        test = evaluate(self._strategy, self.training.dataset, on_batch)
        self._check_finite(test, "test loss", record.step)
        record = dataclasses.replace(
            record,
            test_loss=test.loss,
            test_accuracy=test.accuracy,
            evaluation_sec=time.monotonic() - start,
        )
        self.epochs = [*finished(self.epochs), record]
        self._save()
        self._bar.epoch(record)

    def _synchronize(self, *numbers: float) -> list[float]:
        """Returns the maximum of each number over the workers; raises if any received a signal."""
        self._on_progress()
        signal_number, *largest = self._workers.all_reduce_max(signals.requested(), *numbers)
        signals.check(int(signal_number))
        return largest

    def _save_if_due(self) -> None:
        """Saves within the epoch; takes the time of a step from the slowest worker."""
        every, record = self.training.config.output.checkpoint_every, self._current()
        is_late = time.monotonic() - self._last_save >= _CHECKPOINT_SEC
        is_due = record.step % every == 0 if every else is_late
        is_due = is_due and record.epoch_step < self.training.steps_per_epoch
        self._step_sec, is_due_anywhere = self._synchronize(self._step_sec, is_due)
        if is_due_anywhere:
            self._save()

    def _save(self) -> None:
        """Saves the state of the training, unless the last checkpoint has it."""
        if self._position() == self._saved:
            return
        check_copies(self._strategy)  # The state of the first copy is saved for all copies.
        state, last = self._strategy.state(), self.epochs[-1]
        statistics = self._strategy.states.per_shard_statistics()
        if name := _first_not_finite(state):
            raise self._diverged(f"{name} is not finite", last.step)
        if self._run_dir:
            if last.is_finished:
                last = dataclasses.replace(last, weights_sha256=weights_sha256(state))
                self.epochs = [*self.epochs[:-1], last]
                self._events.add_epoch(last)
            checkpoint = Checkpoint(self.metadata, self.epochs, state, statistics)
            console.log(f"Saved checkpoint {save_checkpoint(self._run_dir, checkpoint).stem}")
            if last.is_finished:
                write_history(self._run_dir, self.metadata, self.epochs, plot_accuracy)
        self._saved, self._last_save = self._position(), time.monotonic()
        self._on_progress()

    def _check_finite(self, totals: StepTotals, description: str, step: int) -> None:
        if not math.isfinite(totals.loss_sum):
            name = _first_not_finite(self._strategy.state())
            cause = f"{name} is not finite" if name else "all weights are finite"
            raise self._diverged(f"{description} {totals.loss}, {cause}", step)

    def _diverged(self, problem: str, step: int) -> DivergedError:
        saved, rate = self._saved[0], self.metadata.learning_rate
        kept = f"; the checkpoint of step {saved} is kept" if saved else ""
        return DivergedError(
            f"{problem} at step {step} with learning rate {rate:g}; use a smaller"
            f" --learning_rate{kept}"
        )

    def _leave(self) -> None:
        """Waits for every worker: none exits before the chief has saved, or needs another."""
        self._workers.all_reduce_max(0)
        self._workers.leave()


def evaluate(
    strategy: Strategy, dataset: ImageDataset, on_batch: Callable[[], Any] = lambda: None
) -> StepTotals:
    """Returns the totals over the whole test set, each example counted once.

    Calls `on_batch` after each batch; an exception that it raises ends the evaluation.
    """
    images, labels = dataset.test_images, dataset.test_labels
    batches = eval_dataset(images, labels, global_batch_size=_EVAL_BATCH_SIZE)
    totals = strategy.evaluate(batches, on_batch)
    if totals.examples != dataset.num_test_examples:
        raise RuntimeError(
            f"evaluated {totals.examples} examples instead of {dataset.num_test_examples}"
        )
    return totals


def _first_not_finite(state: State) -> str | None:
    """Returns the name of the first array that holds a number that is not finite."""
    names = (name for name, array in state.items() if not np.all(np.isfinite(array)))
    return next(names, None)
