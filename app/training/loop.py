"""The outer loop: epochs, evaluation, checkpoints. Of a strategy it sees but the contract."""

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Callable

import numpy as np

from app.config import Config
from app.data.dataset import ImageDataset
from app.devices.device_setup import Devices
from app.devices.free_memory import available_bytes
from app.records.checkpoint import Checkpoint
from app.records.history import EpochRecord, Summary
from app.records.run_log import RunLog
from app.records.run_metadata import Progress, RunMetadata
from app.runtime import console, signals
from app.runtime.errors import DataError, DivergedError, Terminated, is_out_of_memory
from app.runtime.fault_points import fault_point
from app.runtime.progress_bar import TrainingProgress
from app.runtime.versions import versions
from app.training.all_reduce_self_test import run_all_reduce_self_test
from app.training.evaluation import evaluate
from app.training.fault_injection import inject_data_fault, inject_fault
from app.training.memory_estimate import check_memory, too_large
from app.training.optimizers import last_learning_rate
from app.training.replica_divergence import ReplicaDivergence, check_replica_divergence
from app.training.resume import find_state
from app.training.run_writer import NullRunWriter, RunWriter, summary_template
from app.training.strategy_builder import restore
from app.training.training_spec import TrainingSpec
from strategies.base import StepTotals
from strategies.workers import Workers

# Steps go into one compiled call until it takes this long: the bar moves, the host hardly works.
_CALL_SEC = 0.5
# Within an epoch a checkpoint is saved this often, where no number of steps is asked for.
_CHECKPOINT_SEC = 300.0


class Training:
    """One training: built and tried out; nothing is written to `run_dir` yet.

    Where several workers train together each of them makes one of these and calls the same methods
    at the same time. The chief alone reads and writes the directory of the run.

    Args:
        config: what to train and how.
        devices: where.
        dataset: on what.
        run_dir: the directory of the run, locked; None for a worker that is not the chief.
        on_progress: called whenever something was done.

    Raises:
        ConfigError: the strategy cannot run like this, or the fault not happen.
        DataError: another worker has other images.
        DeviceError: the batch cannot fit into memory.
        AllReduceError: the all-reduce loses or repeats what replicas send.
    """

    def __init__(
        self,
        config: Config,
        devices: Devices,
        dataset: ImageDataset,
        run_dir: pathlib.Path | None,
        on_progress: Callable[[], None] = lambda: None,
    ):
        self._config, self._devices, self.dataset = config, devices, dataset
        self._run_dir, self._on_progress = run_dir, on_progress
        self._workers = devices.workers or Workers()
        self._check_same_images()
        self._spec = TrainingSpec(config, dataset)
        self.steps_per_epoch = self._spec.steps_per_epoch
        self.learning_rate = self._spec.learning_rate
        self.strategy = self._spec.build_strategy(devices)
        if "CPU" in devices.names[0]:
            check_memory(available=self._available_bytes(), **self._memory())
        run_all_reduce_self_test(self.strategy)
        if config.fault:
            inject_fault(
                config.fault,
                self.strategy,
                batch_sizes=self._spec.batch_sizes(),
                num_steps=self._spec.num_steps,
            )
        self._metadata = RunMetadata(
            config=config.result_fields(),
            learning_rate=self.learning_rate,
            steps_per_epoch=self.steps_per_epoch,
            dataset=dataset.name,
            dataset_sha256=dataset.sha256(),
            test_part_sha256=dataset.sha256_of_test_part(),
            num_replicas=self.strategy.num_replicas,
            versions=versions(),
        )
        self._progress, self._resumed = Progress(), None
        self._start = self._last_save = time.monotonic()
        self._saved = 0, 0  # Step and epoch of the last checkpoint.
        self._on_progress()

    def _check_same_images(self) -> None:
        digest = self.dataset.sha256()
        for index, other in enumerate(self._workers.gather(digest.encode())):
            if other.decode() != digest:
                raise DataError(
                    f"worker {self._workers.index} has {self.dataset.name} images with SHA-256"
                    f" {digest[:12]}…, worker {index} {other.decode()[:12]}… — the same images are"
                    " required on every worker; give each the same four files"
                )

    def start(self, *, anew: bool) -> None:
        """Goes back to the newest checkpoint that verifies, if there is any.

        Args:
            anew: do not look for one.

        Raises:
            CheckpointError: none verifies, or it is of another training.
        """
        if self._workers.is_chief and not anew:
            self._resume()
        if self._workers.count > 1:
            self._broadcast_from_chief()

    def _broadcast_from_chief(self) -> None:
        """Gives every worker what the chief starts with: it alone has read a checkpoint."""
        text = self._workers.broadcast(json.dumps(dataclasses.asdict(self._progress)).encode())
        self._progress = Progress.parse(json.loads(text), self.steps_per_epoch)
        self._saved = self._progress.step, self._progress.epoch
        self.strategy.broadcast_state()
        own = self._resumed.checkpoint.per_replica_statistics if self._resumed else []
        self.strategy.share_per_replica_statistics(own)

    def _resume(self) -> None:
        resumed = find_state(self._run_dir, self._config, self._metadata)
        if resumed is None:
            return
        self._resumed, self._progress = resumed, resumed.checkpoint.progress
        self._saved = self._progress.step, self._progress.epoch
        restore(
            self.strategy,
            resumed.checkpoint,
            new_schedule_step=self._position if resumed.changes.serious else None,
        )
        resumed.changes.check(self._run_dir, force=self._config.force_resume)
        resumed.report(self._metadata, has_schedule=self._spec.has_schedule)

    @property
    def _position(self) -> int:
        """The step that the data and the schedule are at.

        It is the step of the training, unless that was resumed with epochs of another length.
        """
        return self._progress.epoch * self.steps_per_epoch + self._progress.epoch_step

    def run(self, log: RunLog | None) -> Summary | None:
        """Trains what is left; returns the summary, which is on disk by then.

        Args:
            log: is told what happens; None for a worker that is not the chief, which gets no
                summary either.

        Raises:
            DeviceError: memory ran out.
            DivergedError: a loss or a weight is not finite any more.
            DiskFullError, OutputError: something cannot be saved.
            KeyboardInterrupt, Terminated: a signal came in; the state is saved by then.
        """
        self._begin(log)
        shown = self._workers.is_chief
        with TrainingProgress(
            self._config.epochs, self.steps_per_epoch, self._position, shown=shown
        ) as bar:
            try:
                self._train(bar)
            except Exception as error:
                in_a_step = self._progress.epoch_step < self.steps_per_epoch
                if is_out_of_memory(error) and in_a_step:
                    on_cpu = "CPU" in self.strategy.devices[0]
                    available = available_bytes() if on_cpu else None
                    raise too_large(available=available, **self._memory()) from error
                raise
        summary = self._writer.finish()
        self._workers.all_reduce_max(0)  # None ends, and is missed, before all is written.
        return summary

    def _train(self, bar) -> None:
        """Trains what is left; a signal ends it with the state saved."""
        if self._progress.epoch == self._config.epochs:
            return  # Cut off after the last checkpoint.
        # Kept: taking one of `tf.distribute` apart can wait for half a minute.
        iterator = self._iterator = self.strategy.distribute(self._batches())
        self._compile_sec = _time(lambda: self.strategy.train_steps(iterator, 0))
        fault_point("compile")
        with signals.deferred():
            try:
                while self._progress.epoch < self._config.epochs:
                    self._train_epoch(iterator, bar)
                    self._finish_epoch(bar)
            except (KeyboardInterrupt, Terminated):
                self._save()
                self._workers.all_reduce_max(0)  # None ends before all is written.
                raise

    def _available_bytes(self) -> int | None:
        """Returns the free memory of all machines, each taken to have as little as the fullest."""
        cluster = self._devices.cluster
        available = -self._workers.all_reduce_max(-(available_bytes() or math.inf))[0]
        if math.isinf(available):
            return None
        return int(available) * (cluster.num_machines if cluster else 1)

    def _memory(self) -> dict:
        """Returns what the memory of a step depends on."""
        return {
            "model": self.strategy.model,
            "optimizer": self.strategy.optimizer,
            "num_replicas": self.strategy.num_replicas,
            "global_batch_size": max(self._spec.batch_sizes()),
        }

    def _begin(self, log: RunLog) -> None:
        resumed, self._resumed = self._resumed, None  # Its arrays are of no more use.
        template = summary_template(
            self._config, self._devices, self.dataset, self.strategy, self._metadata
        )
        self._writer = RunWriter(self._run_dir, log, template) if log else NullRunWriter()
        self._writer.begin(self._metadata)
        if resumed:
            self._writer.go_on(resumed)

    def _batches(self):
        """Returns the training set from the next step on, spoiled where that was asked for."""

        def batches(seed):
            return self._spec.batches(seed=seed, start_step=self._position)

        seed, fault = self._config.seed, self._config.fault
        if fault is None:
            return batches(seed)
        return inject_data_fault(fault, batches, seed=seed, num_replicas=self.strategy.num_replicas)

    def _train_epoch(self, iterator, bar) -> None:
        """Makes the steps that the epoch under way still lacks."""
        step_sec = math.inf
        while self._progress.epoch_step < self.steps_per_epoch:
            num_steps = self._steps_of_next_call(step_sec)
            start = time.monotonic()
            totals = self.strategy.train_steps(iterator, num_steps)
            call_sec = time.monotonic() - start
            self._advance(num_steps, totals, call_sec)
            fault_point("step")
            self._check_finite(totals, "training loss")
            images_per_sec = totals.examples / call_sec
            bar.step(self._position, self._totals, images_per_sec)
            self._writer.steps(
                self._progress.step,
                totals,
                images_per_sec=images_per_sec,
                learning_rate=last_learning_rate(self.strategy.optimizer),
            )
            step_sec, is_save_due = self._settle(call_sec / num_steps, self._is_save_due())
            if is_save_due:
                self._save()

    def _settle(self, *numbers: float) -> list[float]:
        """Settles with the other workers what depends on clocks and signals, between two calls.

        Returns:
            The largest number of each worker's.

        Raises:
            KeyboardInterrupt, Terminated: a signal has come in on any of them.
        """
        self._on_progress()
        signal_number, *agreed = self._workers.all_reduce_max(signals.requested(), *numbers)
        signals.check(int(signal_number))
        return agreed

    def _steps_of_next_call(self, step_sec: float) -> int:
        """Returns how many steps go into one call: as many as fit, up to the next milestone."""
        num_steps = self._config.steps_per_call or max(1, int(_CALL_SEC / step_sec))
        every = self._config.checkpoint_every
        to_checkpoint = every - self._progress.step % every if every else num_steps
        return min(num_steps, to_checkpoint, self.steps_per_epoch - self._progress.epoch_step)

    def _advance(self, num_steps: int, totals: StepTotals, call_sec: float) -> None:
        progress, sums = self._progress, self._totals.plus(totals)
        self._progress = dataclasses.replace(
            progress,
            step=progress.step + num_steps,
            epoch_step=progress.epoch_step + num_steps,
            **sums._asdict(),
            epoch_sec=progress.epoch_sec + call_sec,
        )

    @property
    def _totals(self) -> StepTotals:
        """Sums over the epoch under way."""
        progress = self._progress
        return StepTotals(progress.loss_sum, progress.correct, progress.examples)

    def _is_save_due(self) -> bool:
        """Whether to save in mid-epoch; the end of an epoch is saved with its evaluation."""
        if self._progress.epoch_step == self.steps_per_epoch:
            return False
        if self._config.checkpoint_every:
            return self._progress.step % self._config.checkpoint_every == 0
        return time.monotonic() - self._last_save >= _CHECKPOINT_SEC

    def _finish_epoch(self, bar) -> None:
        """Evaluates the epoch under way and saves it."""
        bar.evaluating()
        self._progress = self._with_divergence(self._check_replica_divergence())
        start = time.monotonic()
        test = evaluate(self.strategy, self.dataset, self._after_test_batch)
        evaluation_sec = time.monotonic() - start
        self._check_finite(test, "test loss")
        progress, train = self._progress, self._totals
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
            injected_fault=str(self._config.fault or ""),
            learning_rate=last_learning_rate(self.strategy.optimizer),
            evaluation_sec=evaluation_sec,
        )
        self._progress = Progress(
            step=progress.step,
            total_sec=progress.total_sec,
            history=[*progress.history, record],
            changes=progress.changes,
        )
        self._save()
        bar.epoch(record)
        fault_point("epoch")
        self._settle()

    def _with_divergence(self, divergence: ReplicaDivergence) -> Progress:
        """Notes how far apart the statistics are before the evaluation averages them."""
        apart = max(divergence.absolute, self._progress.statistics_apart)
        return dataclasses.replace(self._progress, statistics_apart=apart)

    def _after_test_batch(self) -> None:
        fault_point("evaluate")
        self._settle()

    def _check_replica_divergence(self) -> ReplicaDivergence:
        """Stops a training whose replicas are not in step; says once what they keep apart."""
        divergence = check_replica_divergence(self.strategy)
        if divergence.tensor and not self._progress.history and self._workers.is_chief:
            console.say(
                f"replicas hold the same weights, bit for bit; their own statistics are up to"
                f" {divergence.absolute:.2g} apart ({divergence.tensor}) and are averaged now"
            )
        return divergence

    def _check_finite(self, totals: StepTotals, what: str) -> None:
        if not math.isfinite(totals.loss_sum):
            name = _first_not_finite(self.strategy.state())
            where = f", {name} is not finite" if name else ", all weights are finite"
            raise self._diverged(f"{what} {totals.loss}{where}")

    def _diverged(self, what: str) -> DivergedError:
        step, _ = self._saved
        kept = f"; the checkpoint of step {step} is kept" if step else ""
        return DivergedError(
            f"{what} at step {self._progress.step} with learning rate {self.learning_rate:g} — a"
            f" finite loss and finite weights are required; use a smaller --learning_rate{kept}"
        )

    def _save(self) -> None:
        """Saves all that the training consists of, unless it is saved already."""
        progress = self._progress
        if (progress.step, progress.epoch) == self._saved:
            return
        if progress.epoch_step:
            check_replica_divergence(
                self.strategy
            )  # What is saved is replica 0's: it stands for all.
        own = self.strategy.per_replica_statistics()
        state = self.strategy.state()
        self.strategy.load_per_replica_statistics(
            own
        )  # The training goes on as if nothing had been.
        if name := _first_not_finite(state):
            raise self._diverged(f"{name} is not finite")
        now = time.monotonic()
        progress = dataclasses.replace(progress, total_sec=progress.total_sec + now - self._start)
        self._progress, self._start = progress, now
        checkpoint = Checkpoint(self._metadata, progress, state, own)
        self._writer.save(checkpoint, compile_sec=self._compile_sec)
        self._saved, self._last_save = (progress.step, progress.epoch), time.monotonic()
        self._on_progress()


def _first_not_finite(state: dict[str, np.ndarray]) -> str | None:
    """Returns the name of the first array that holds a number that is not finite."""
    names = (name for name, array in state.items() if not np.all(np.isfinite(array)))
    return next(names, None)


def _time(call) -> float:
    start = time.monotonic()
    call()
    return time.monotonic() - start
