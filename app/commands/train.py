"""`train`: runs one training in one directory."""

import contextlib
import functools
import os
import pathlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from app.devices import device_setup
from app.devices.cluster import Cluster, find_cluster, is_in_cluster
from app.devices.device_setup import Devices
from app.options import Config
from app.options.names import DEFAULT_LOCAL_WORKERS
from app.records.caveats import caveats, injected_fault_caveat
from app.records.checkpoint import load_finished
from app.records.history import Summary
from app.records.run_directory import (
    LOG_FILE,
    RunDirectory,
    default_out,
    named_path,
    open_log,
    open_run_directory,
)
from app.records.run_metadata import summarize
from app.runtime import console, watchdog
from app.runtime.errors import ConfigError, StalledError
from app.training.resume import find_checkpoint, find_result

if TYPE_CHECKING:  # Imports TensorFlow.
    from app.training.loop import Training


def run(config: Config) -> Summary | None:
    """Trains, resumes a training, or prints the result of a finished one, and returns the summary.

    In a cluster, only the chief writes files and returns a summary.
    """
    is_local = config.has_workers and not is_in_cluster()
    if config.has_workers and not is_local:
        cluster = _find_cluster(config)
        if not cluster.is_chief:
            _assist(config)
            return None
        config = config.replace(num_workers=len(cluster.addresses))
    distribution, output = config.distribution, config.output
    path = named_path(output.out or default_out(distribution.strategy, config.training.model))
    with console.resumable(path, overwrite=output.overwrite):
        return _train_locally(config, path) if is_local else _run_in(config, path)


def _train_locally(config: Config, path: pathlib.Path) -> Summary:
    """Starts the workers of a training on this machine; worker 0 prints and saves everything."""
    from app.devices.local_workers import train_with_local_workers

    train_with_local_workers(config, config.cluster.num_workers or DEFAULT_LOCAL_WORKERS, path)
    finished = load_finished(path)
    return summarize(finished.metadata, finished.progress)


def _run_in(config: Config, path: pathlib.Path) -> Summary:
    """Trains in a directory, or prints the result that is there."""
    with open_run_directory(path, config.result_fields()) as run_directory:
        open_log(path)
        summary = _train(config, run_directory)
        for caveat in caveats(config, summary):
            console.warn(caveat)
        for line in summary.last_lines():
            console.say(line)
    return summary


def _find_cluster(config: Config) -> Cluster:
    """Reads the cluster of the environment.

    Raises:
        ConfigError: it is invalid, or has another number of workers than the flag says.
    """
    cluster = find_cluster()
    found = len(cluster.addresses)
    if config.cluster.num_workers not in (None, found):
        raise ConfigError(
            f"--num_workers={config.cluster.num_workers}, but {cluster.source} defines a cluster of"
            f" {found}; leave the flag out,"
            " or unset the variable to start the workers on this machine"
        )
    return cluster


# The chief's first message to the other workers.
_TRAIN, _FINISHED = b"train", b"finished"


def _train(config: Config, run_directory: RunDirectory) -> Summary:
    """Trains what is left to train in the directory; returns the result."""
    path, overwrite = run_directory.path, config.output.overwrite
    found = None
    if not overwrite:
        found = find_checkpoint(path)
        summary = find_result(run_directory, found, config.num_devices_of_all_workers)
        if summary:
            _warn_of_fault(config)
            if config.has_workers:  # The other workers wait for the chief.
                _announce_to_others(device_setup.set_up(config), _FINISHED)
            return summary
    devices = device_setup.set_up(config)
    _announce_to_others(devices, _TRAIN)
    where = f"to resume --out={path}", f"in {LOG_FILE} there"
    with _built_training(config, devices, path, *where) as training:
        training.start(found)
        del found  # Its arrays are not needed any more.
        run_directory.start(overwrite=overwrite)
        console.log(f"Kernels of the CPU: {training.cpu_kernels}")
        _announce(config, devices, training)
        summary = training.run()
        assert summary, "the chief has a run directory"
    console.say(f"saved in {path}; open {path / 'accuracy.png'}")
    return summary


def _assist(config: Config) -> None:
    """Trains as a worker other than the chief.

    On the terminal of local workers, the last line is the chief's.
    """
    shares_terminal = console.is_part()
    os.environ[console.PART_VARIABLE] = "1"  # Only the chief says how to resume.
    devices = device_setup.set_up(config)
    from strategies.workers import Workers

    workers = devices.workers or Workers()
    with _naming_lost_peers(devices):
        is_finished = workers.broadcast() == _FINISHED
        if not is_finished:
            with _built_training(config, devices, None, "on every worker", "above") as training:
                training.start(None)
                index = workers.index
                console.say(f"worker {index}: training; worker 0 prints and saves the results")
                training.run()
    if not shares_terminal:
        done = (
            "the training is finished already" if is_finished else f"worker {workers.index}: done"
        )
        console.say(done)


@contextlib.contextmanager
def _built_training(
    config: Config, devices: Devices, path: pathlib.Path | None, where: str, stacks: str
) -> "Iterator[Training]":
    """Loads the data and builds the training; ends the process if the block makes no progress.

    Args:
        config: options of the training.
        devices: its devices.
        path: the run directory; None on a worker other than the chief.
        where: what to do with the same command after that.
        stacks: where the stacks of all threads then are.
    """
    from app.data.dataset_loader import load_data

    dataset, timeout_sec = load_data(config), config.output.stall_timeout_sec
    stalled = StalledError(
        f"no progress for {timeout_sec} s (--stall_timeout_sec); run the same command again"
        f" {where}; the stacks of all threads are {stacks}"
    )
    with watchdog.watch(timeout_sec, stalled) as on_progress, _naming_lost_peers(devices):
        from app.training.loop import Training
        from app.verification.step_verifier import create_step_verifier

        verifier = functools.partial(create_step_verifier, path)
        yield Training(config, devices, dataset, path, on_progress, verifier)


def _naming_lost_peers(devices: Devices) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that names a lost worker in the error."""
    if devices.cluster is None:
        return contextlib.nullcontext()
    from app.devices.rendezvous import naming_lost_peers

    return naming_lost_peers(devices.cluster)


def _announce_to_others(devices: Devices, what: bytes) -> None:
    if devices.workers:
        with _naming_lost_peers(devices):
            devices.workers.broadcast(what)


def _announce(config: Config, devices: Devices, training: "Training") -> None:
    spec, dataset = training.spec, training.spec.dataset
    console.say(
        f"{config.distribution.strategy}: {config.training.model} on {dataset.name},"
        f" {dataset.num_train_examples:,} training images"
    )
    console.say(
        f"{console.count(config.training.epochs, 'epoch')} of"
        f" {console.count(spec.steps_per_epoch, 'step')}, recipe {config.training.recipe},"
        f" batch {config.training.global_batch_size}, {spec.rate_text()}"
    )
    num_replicas, num_devices = training.strategy.num_replicas, training.strategy.num_devices
    split = f"{console.count(num_replicas, 'replica')} of {num_devices // num_replicas} devices:"
    shown = "replicas on" if num_replicas == num_devices else split
    console.say(f"{shown} {', '.join(devices.names)}")
    _warn_of_fault(config)
    if devices.simulated and not config.distribution.num_gpus:  # That has a warning of its own.
        console.say("simulated devices: they share one processor, timing is not scaling")


def _warn_of_fault(config: Config) -> None:
    if config.verification.fault:
        console.warn(injected_fault_caveat(str(config.verification.fault)))
