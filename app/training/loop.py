"""Runs a training: steps, verification, checkpoints, evaluation."""

import contextlib
import math
import pathlib
import time
from collections.abc import Callable, Iterator

import tensorflow as tf

from app.data.dataset import ImageDataset
from app.devices.device_setup import Devices
from app.options import Config
from app.records.checkpoint import Checkpoint
from app.records.history import Summary
from app.records.run_metadata import Progress, is_finished, summarize
from app.runtime import console, signals
from app.runtime.errors import DeviceError, MismatchError, Terminated, memory_error
from app.runtime.progress_bar import TrainingProgress
from app.runtime.versions import CPU_KERNELS
from app.training.all_reduce_self_test import run_all_reduce_self_test
from app.training.evaluation import evaluate
from app.training.fault_injection import FaultyObserver, inject_fault
from app.training.optimizers import last_learning_rate
from app.training.run_writer import RunWriter
from app.training.step_check import CreateStepCheck
from app.training.training_spec import TrainingSpec
from app.training.training_state import TrainingState
from strategies.step_totals import StepTotals
from strategies.workers import Workers

# The number of steps of a compiled call grows until it takes this long, so that the bar is updated
# and the host is mostly idle.
_CALL_SEC = 0.5
# After each call the workers synchronise, which takes several round trips through the network.
_CALL_SEC_OF_WORKERS = 2.0


class Training:
    """Runs one training. The constructor builds and tests it, and writes nothing to `run_dir`.

    With several workers, each of them creates and runs a `Training` at the same time. Only the
    chief reads and writes the run directory.

    Args:
        config: options of the training.
        devices: the devices.
        dataset: the data.
        run_dir: the run directory, locked; None for a worker other than the chief.
        on_progress: called whenever there is progress.
        create_step_check: creates what verifies steps while they are trained; None for none.

    Attributes:
        spec: the data, batches, steps and learning rate.
        strategy: the strategy, with the model and the optimizer.

    Raises:
        ConfigError: the strategy cannot run like this, or the fault has no effect.
        DataError: another worker has other data.
        AllReduceError: the all-reduce loses or repeats values of replicas.
    """

    def __init__(
        self,
        config: Config,
        devices: Devices,
        dataset: ImageDataset,
        run_dir: pathlib.Path | None,
        on_progress: Callable[[], None] = lambda: None,
        create_step_check: CreateStepCheck = lambda spec, strategy: None,
    ) -> None:
        self._config, self._run_dir, self._on_progress = config, run_dir, on_progress
        self._workers = devices.workers or Workers()
        self.spec = TrainingSpec(config, dataset)
        self.spec.check_same_data(self._workers)
        self.strategy = self.spec.build_strategy(devices)
        run_all_reduce_self_test(self.strategy)
        self._faulty: FaultyObserver | None = None
        if config.verification.fault:
            self._faulty = inject_fault(
                config.verification.fault,
                self.strategy,
                batch_sizes=self.spec.batch_sizes(),
                num_steps=self.spec.num_steps,
            )
        self._step_check = create_step_check(self.spec, self.strategy)
        self._metadata = self.spec.metadata(self.strategy, devices)
        self._state = TrainingState(config, self.strategy, self._metadata)
        self._resumed: Checkpoint | None = None
        self._writer: RunWriter | None = None  # `_begin` creates it, on the chief alone.
        self._step_sec = math.inf
        self._on_progress()

    def start(self, resumed: Checkpoint | None) -> None:
        """Restores the checkpoint from which the run resumes; None to start from scratch.

        Raises:
            CheckpointError: it is of another training.
        """
        self._resumed = resumed
        if self._run_dir and resumed:
            self._state.restore(resumed, self._run_dir, has_schedule=self.spec.has_schedule)
        if self._workers.count > 1:
            self._state.broadcast(self._workers, resumed)

    @property
    def cpu_kernels(self) -> str:
        """Which kernels compute on the CPU, for example "oneDNN on AVX2"."""
        return self._metadata.versions[CPU_KERNELS]

    @property
    def is_finished(self) -> bool:
        """Whether all epochs are trained, evaluated and saved."""
        return is_finished(self._metadata, self._state.progress)

    def run(self) -> Summary | None:
        """Trains the remaining steps; returns the summary, which has been written.

        Returns None without a run directory.

        Raises:
            DeviceError: memory ran out.
            DivergedError: a loss or a weight is not finite.
            DiskFullError, OutputError: a file cannot be saved.
            MismatchError: a verified step differs from the reference.
            ReplicaDivergenceError: replicas hold different weights.
            KeyboardInterrupt, Terminated: a signal was received; the state has been saved.
        """
        self._begin()
        self._train()
        self._wait_for_all()
        return summarize(self._metadata, self._state.progress) if self._writer else None

    def _train(self) -> None:
        """Trains the remaining epochs; after a signal, saves the state and ends."""
        with self._bar, self._naming_out_of_memory(), signals.deferred():
            try:
                while not self.is_finished:
                    while self._is_within_epoch():
                        self.step(self._num_steps_of_next_call())
                        if self._is_save_due():
                            self.save()
                    self._end_epoch()
                    self._synchronize()
            except (KeyboardInterrupt, Terminated):
                self.save()
                self._wait_for_all()
                raise
            except MismatchError:
                if self._writer:
                    self._writer.mismatch(self._state.progress)
                raise

    def _begin(self) -> None:
        """Starts the records in the run directory, if there is one; compiles the step."""
        if self._run_dir:
            progress = self._state.progress
            self._writer = RunWriter(self._run_dir, self._metadata, progress, self._resumed)
        self._resumed = None  # The arrays of the checkpoint are not needed any more.
        if self._faulty:
            self._faulty.begin()
        self._bar = TrainingProgress(
            self._config.training.epochs,
            self.spec.steps_per_epoch,
            self._state.progress.step,
            shown=self._workers.is_chief,
        )
        if self.is_finished:
            return  # The previous attempt was interrupted after its last checkpoint.
        with self._naming_out_of_memory():
            # An attribute, because deleting an iterator of `tf.distribute` can take 30 s.
            self._iterator = self.strategy.distribute(self._batches())
            start = time.monotonic()
            self.strategy.train_steps(self._iterator, 0)
            if self._step_check:
                self._step_check.compile(self._iterator)
            self._state.add_compilation(time.monotonic() - start)

    def step(self, num_steps: int) -> StepTotals:
        """Trains some steps in one compiled call, and adds them to the progress of the epoch.

        Args:
            num_steps: at most the remaining steps of the epoch.

        Raises:
            DivergedError: the loss is not finite.
            MismatchError: the step was verified and differs from the reference.
        """
        before, start = self._state.progress, time.monotonic()
        if self._step_check:
            totals, call_sec = self._step_check.train_steps(self._iterator, num_steps, before)
            self._state.add_verification(time.monotonic() - start - call_sec)
        else:
            totals = self.strategy.train_steps(self._iterator, num_steps)
            call_sec = time.monotonic() - start
        self._step_sec = call_sec / num_steps
        self._state.add_steps(num_steps, totals, call_sec=call_sec)
        self._verify_if_due(before)  # A wrong step may be why a loss is not finite.
        self._state.check_finite(totals, "training loss")
        progress, images_per_sec = self._state.progress, totals.examples / call_sec
        self._bar.step(progress.step, progress.totals, images_per_sec)
        if self._writer:
            self._writer.steps(
                progress,
                totals,
                images_per_sec=images_per_sec,
                learning_rate=last_learning_rate(self.strategy.optimizer),
            )
        return totals

    def _verify_if_due(self, before: Progress) -> None:
        """Checks the last step, if it was recorded; at a mismatch warns, or rolls back and ends.

        Args:
            before: progress before the step.

        Raises:
            MismatchError: the step is wrong, and the training is configured to stop.
        """
        if self._step_check is None or not self._step_check.is_due(before):
            return
        start = time.monotonic()
        finding = self._step_check.check(before)
        is_wrong = finding is not None
        self._state.add_verification(time.monotonic() - start, verified=1, wrong=int(is_wrong))
        if finding is None:
            return
        if self._config.verification.on_mismatch == "warn":
            console.warn(finding.text)
            return
        if self._state.roll_back(before, finding.before, finding.per_shard_statistics):
            self.save()
        saved_step = self._state.checkpoints.saved_step
        kept = f"the state after step {saved_step} is saved" if saved_step else "no state is saved"
        again = "resume" if saved_step else "start again"
        raise MismatchError(
            f"{finding.text}; {kept}; find the cause, or {again} with --on_mismatch=warn"
        )

    def _end_epoch(self) -> None:
        """Evaluates and saves the epoch whose steps have been trained.

        Raises:
            DivergedError: the loss or a weight is not finite.
            ReplicaDivergenceError: replicas hold different weights.
        """
        self._bar.evaluating()
        self._state.check_replica_divergence(shown=self._workers.is_chief)
        start = time.monotonic()
        test = evaluate(self.strategy, self.spec.dataset, self._after_test_batch)
        evaluation_sec = time.monotonic() - start
        self._state.check_finite(test, "test loss")
        self._state.finish_epoch(test, evaluation_sec=evaluation_sec)
        self.save()
        self._bar.epoch(self._state.progress.history[-1])

    def save(self) -> None:
        """Saves the state of the training, unless the last checkpoint has it."""
        if self._state.save(self._writer):
            self._on_progress()

    def _batches(self) -> tf.data.Dataset:
        """Returns the training dataset from the next step on, with any injected data fault."""

        def batches(seed: int) -> tf.data.Dataset:
            return self.spec.batches(seed=seed, start_step=self._state.progress.step)

        seed = self._config.training.seed
        return self._faulty.batches(batches, seed) if self._faulty else batches(seed)

    @contextlib.contextmanager
    def _naming_out_of_memory(self) -> Iterator[None]:
        """Converts out-of-memory errors of training steps to an error that names the batch.

        Raises:
            DeviceError: a step ran out of memory.
        """
        try:
            yield
        except Exception as error:
            if not memory_error(error) or not self._is_within_epoch():
                raise
            size, num_replicas = max(self.spec.batch_sizes()), self.strategy.num_replicas
            half = size // 2 // num_replicas * num_replicas
            smaller = f"use --global_batch_size={half} or less"
            raise DeviceError(
                f"out of memory: --global_batch_size={size}, which is"
                f" {-(-size // num_replicas):,} images on each of"
                f" {console.count(num_replicas, 'replica')}, does not fit;"
                f" {smaller if half else 'use fewer devices or a machine with more memory'}"
            ) from error

    def _is_within_epoch(self) -> bool:
        return self._state.progress.epoch_step < self.spec.steps_per_epoch

    def _num_steps_of_next_call(self) -> int:
        """Returns the number of steps of the next compiled call."""
        progress = self._state.progress
        num_steps = self._state.checkpoints.num_steps_before_next(progress)
        if self._step_check:
            num_steps = min(num_steps, self._step_check.num_steps_before_next(progress))
        return min(num_steps, self._num_steps_in_time())

    def _num_steps_in_time(self) -> int:
        """Returns the number of steps that take as long as a call should."""
        call_sec = _CALL_SEC_OF_WORKERS if self._workers.count > 1 else _CALL_SEC
        return max(1, int(call_sec / self._step_sec))

    def _is_save_due(self) -> bool:
        """Returns whether to save within the epoch, after every worker has trained its steps.

        The workers' clocks differ; they also take the time of a step from the slowest worker.
        """
        is_due = self._state.checkpoints.is_due(self._state.progress)
        self._step_sec, is_due_anywhere = self._synchronize(self._step_sec, is_due)
        return bool(is_due_anywhere)

    def _synchronize(self, *numbers: float) -> list[float]:
        """Synchronises values that depend on clocks and signals, between two calls.

        Returns:
            The maximum of each number over the workers.

        Raises:
            KeyboardInterrupt, Terminated: any worker has received a signal.
        """
        self._on_progress()
        signal_number, *largest = self._workers.all_reduce_max(signals.requested(), *numbers)
        signals.check(int(signal_number))
        return largest

    def _after_test_batch(self) -> None:
        self._synchronize()

    def _wait_for_all(self) -> None:
        """Waits for every worker: none exits before the chief has saved, or needs another."""
        self._workers.all_reduce_max(0)
        self._workers.leave()
