"""`train`: runs one training in one directory."""

import contextlib
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from app import console, signals
from app.devices import setup
from app.devices.cluster import find_cluster, naming_lost_peers
from app.devices.setup import Devices
from app.errors import StalledError
from app.options import Config
from app.records.checkpoint import Checkpoint, find_newest_checkpoint, find_result, load_finished
from app.records.history import TIMING_CAVEAT, caveats, injected_fault_caveat, last_lines, summarize
from app.records.run_directory import (
    RunDirectory,
    default_out,
    named_path,
    open_log,
    open_run_directory,
)

if TYPE_CHECKING:  # It imports TensorFlow.
    from app.training.loop import TrainingLoop


def run(config: Config) -> dict[str, Any] | None:
    """Trains or resumes, or prints a finished result; only the chief returns the summary."""
    cluster = find_cluster() if config.has_workers else None
    if cluster and cluster.index:
        _assist(config)
        return None
    strategy, output = config.distribution.strategy, config.output
    path = named_path(output.out or default_out(strategy, config.training.model))
    with console.resumable(path, overwrite=output.overwrite):
        if cluster or not config.has_workers:
            return _run_in(config, path)
        from app.devices.local_workers import train_with_local_workers

        # Worker 0 prints and saves everything.
        train_with_local_workers(config, config.num_workers or 2, path)
        finished = load_finished(path)
        return summarize(finished.metadata, finished.epochs)


def _run_in(config: Config, path: pathlib.Path) -> dict[str, Any]:
    """Trains what is left to train in a directory, or prints the result that is there."""
    from app.report.plots import plot_accuracy

    with open_run_directory(path, config.result_fields()) as run_directory:
        open_log(path)
        found = summary = None
        if not config.output.overwrite:
            found = find_newest_checkpoint(path)
            summary = find_result(run_directory, found, plot_accuracy)
        if config.fault:
            console.warn(injected_fault_caveat(config.fault))
        if summary is None or config.has_workers:  # The other workers wait for the chief.
            summary = _train(config, run_directory, found)
        for caveat in caveats(summary):
            console.warn(caveat)
        for line in last_lines(summary):
            console.say(line)
    return summary


def _train(config: Config, run_directory: RunDirectory, found: Checkpoint | None) -> dict[str, Any]:
    """Trains from a checkpoint on, or from scratch."""
    path, devices = run_directory.path, setup.set_up(config)
    with _training_loop(config, devices, path, found) as loop:
        run_directory.start(overwrite=config.output.overwrite)
        _announce(config, devices, loop)
        epochs = loop.run()
    console.say(f"saved in {path}; open {path / 'accuracy.png'}")
    return summarize(loop.metadata, epochs)


def _assist(config: Config) -> None:
    """Trains as a worker other than the chief, which prints the last line."""
    shares_terminal = console.PART_VARIABLE in os.environ
    os.environ[console.PART_VARIABLE] = "1"  # Only the chief says how to resume.
    devices = setup.set_up(config)
    assert devices.workers
    what = f"worker {devices.workers.index}"
    with _training_loop(config, devices, None, None) as loop:
        console.say(f"{what}: training; worker 0 prints and saves the results")
        loop.run()
    if not shares_terminal:
        console.say(f"{what}: done")


@contextlib.contextmanager
def _training_loop(
    config: Config, devices: Devices, path: pathlib.Path | None, found: Checkpoint | None
) -> "Iterator[TrainingLoop]":
    """Loads the data and builds the training; ends the process if the block makes no progress."""
    from app.data.fashion_mnist import load_data

    dataset, timeout_sec = load_data(config), config.output.stall_timeout_sec
    stalled = StalledError(
        f"no progress for {timeout_sec} s (--stall_timeout_sec); run the same command again; the"
        f" stacks of all threads are {f'in {console.log_file()}' if path else 'above'}"
    )
    stall_limit, workers = signals.stall_limit(timeout_sec, stalled), devices.workers
    named = naming_lost_peers(workers) if workers else contextlib.nullcontext()
    with stall_limit as on_progress, named:
        from app.training.build import TrainingRun
        from app.training.loop import TrainingLoop

        run, check_step = TrainingRun(config, devices, dataset), None
        if config.verification.verify_every:
            from app.verification.step_check import StepCheck

            check_step = StepCheck(run).train_step
        yield TrainingLoop(run, path, found, on_progress, check_step)


def _announce(config: Config, devices: Devices, loop: "TrainingLoop") -> None:
    run, training = loop.training, config.training
    console.say(
        f"{config.distribution.strategy}: {training.model} on {run.dataset.name},"
        f" {run.dataset.num_train_examples:,} training images"
    )
    rate, peak = f"learning rate {run.learning_rate:.4g}", run.recipe.peak_learning_rate
    if not training.learning_rate and run.learning_rate != peak:
        rate += f" ({peak:g}, scaled to the batch and the number of steps)"
    console.say(
        f"{console.count(training.epochs, 'epoch')} of"
        f" {console.count(run.steps_per_epoch, 'step')}, recipe {training.recipe},"
        f" batch {training.global_batch_size}, {rate}"
    )
    console.say(f"replicas on {', '.join(devices.names)}")
    if devices.simulated:
        console.say(TIMING_CAVEAT)
