"""`train`: runs one training in one directory."""

import contextlib
import functools
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.devices import device_setup
from app.devices.cluster import Cluster, find_cluster, is_in_cluster
from app.options import Config, rules
from app.options.names import DEFAULT_LOCAL_WORKERS
from app.records.caveats import caveats, injected_fault_caveat
from app.records.checkpoint import load_finished
from app.records.history import Summary
from app.records.run_directory import (
    LOG_FILE,
    RunDirectory,
    check_same_run,
    default_out,
    named_path,
    open_log,
    open_run_directory,
)
from app.records.run_metadata import is_finished, summarize
from app.runtime import console, watchdog
from app.runtime.errors import CheckpointError, ConfigError, StalledError
from app.training.resume import ACCEPTED, find_checkpoint
from app.training.run_writer import write_records

if TYPE_CHECKING:
    # Importing these modules imports TensorFlow.
    from app.data.dataset import ImageDataset
    from app.training.loop import Training


def run(config: Config) -> Summary | None:
    """Trains, resumes a training, or prints the result of a finished one, and returns the summary.

    In a cluster, only the chief writes files and returns a summary.
    """
    if config.distribution.strategy == "multi_worker" and not is_in_cluster():
        return _run_local_workers(config)
    cluster = _find_cluster(config) if config.distribution.strategy == "multi_worker" else None
    if cluster and not cluster.is_chief:
        _assist(config)
        return None
    path = named_path(
        config.output.out or default_out(config.distribution.strategy, config.training.model)
    )
    with (
        console.resumable(path, overwrite=config.output.overwrite),
        open_run_directory(path, config.result_fields()) as run_directory,
    ):
        open_log(path)
        summary = None if config.output.overwrite else find_result(config, run_directory)
        if summary:
            console.say(f"{path} is already finished; this is its result")
            _warn_of_fault(config)
            if (
                config.distribution.strategy == "multi_worker"
            ):  # The other workers wait for the chief.
                _announce_to_others(device_setup.set_up(config), _FINISHED)
        else:
            summary = _train(config, run_directory)
            console.say(f"saved in {path}; open {path / 'accuracy.png'}")
        print_result(config, summary)
    return summary


def _run_local_workers(config: Config) -> Summary:
    """Starts the workers of a training on this machine; worker 0 prints and saves everything."""
    from app.devices.local_workers import train_with_local_workers

    path = named_path(
        config.output.out or default_out(config.distribution.strategy, config.training.model)
    )
    num_workers = config.cluster.num_workers or DEFAULT_LOCAL_WORKERS
    with console.resumable(path, overwrite=config.output.overwrite):
        train_with_local_workers(config, num_workers, path)
    finished = load_finished(path)
    return summarize(finished.metadata, finished.progress)


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


def print_result(config: Config, summary: Summary) -> None:
    """Prints the caveats of a training and its last lines."""
    for caveat in caveats(config, summary):
        console.warn(caveat)
    for line in summary.last_lines():
        console.say(line)


def find_result(config: Config, run_directory: RunDirectory) -> Summary | None:
    """Returns the result of a finished run in the directory; None if there is still to train.

    Also None if a default has become a value or the other way round: the training compares values.

    Raises:
        CheckpointError: the run in the directory has another configuration, or no valid checkpoint.
        DiskFullError, OutputError: a record that is missing cannot be written.
    """
    path, new = run_directory.path, config.result_fields()
    found = find_checkpoint(path)
    old = found.metadata.config if found else run_directory.old_config()
    if not old:
        return None
    changed = check_same_run(path, old, new if found else run_directory.config, accepted=ACCEPTED)
    if found is None or not is_finished(found.metadata, found.progress):
        return None
    metadata, progress = found.metadata, found.progress
    if found.damaged or "epochs" in changed:
        return None
    asked, num_devices = config.num_devices_of_all_workers, len(metadata.devices)
    if config.distribution.strategy == "multi_worker" and config.num_devices_asked:
        asked = config.num_devices_asked * len(find_cluster(os.environ).addresses)
    differing = list(changed.values())
    if asked not in (None, num_devices):
        differing.append(f"devices {num_devices} → {asked}")
    if differing:
        raise CheckpointError(
            f"--out={path} holds a finished run of another configuration"
            f" ({'; '.join(differing)}); choose"
            " another directory, raise --epochs to continue, or use --overwrite"
        )
    if any(old.get(name) != value for name, value in new.items()):  # A default and a value.
        return None
    write_records(path, metadata, progress)
    return summarize(metadata, progress)


def _train(config: Config, run_directory: RunDirectory) -> Summary:
    prepared = device_setup.set_up(config)
    _announce_to_others(prepared, _TRAIN)
    dataset = _load_data(config, prepared)
    path = run_directory.path
    with (
        _watch(config, f"to resume --out={path}", f"in {LOG_FILE} there") as on_progress,
        _naming_lost_peers(prepared),
    ):
        from app.training.loop import Training
        from app.verification.step_verifier import create_step_verifier

        verifier = functools.partial(create_step_verifier, path)
        training = Training(config, prepared, dataset, path, on_progress, verifier)
        training.start(None if config.output.overwrite else find_checkpoint(path))
        run_directory.start(overwrite=config.output.overwrite)
        console.log(f"Kernels of the CPU: {training.cpu_kernels}")
        _announce(config, prepared, training)
        summary = training.run()
        assert summary, "the chief has a run directory"
        return summary


# The chief's first message to the other workers.
_TRAIN, _FINISHED = b"train", b"finished"


def _assist(config: Config) -> None:
    """Trains as a worker other than the chief.

    On the terminal of local workers, the last line is the chief's.
    """
    shares_terminal = console.is_part()
    os.environ[console.PART_VARIABLE] = "1"  # Only the chief says how to resume.
    prepared = device_setup.set_up(config)
    from strategies.workers import Workers

    workers = prepared.workers or Workers()
    with _naming_lost_peers(prepared):
        if workers.broadcast() == _FINISHED:
            if not shares_terminal:
                console.say("the training is finished already")
            return
        dataset = _load_data(config, prepared)
        with _watch(config, "on every worker", "above") as on_progress:
            from app.training.loop import Training
            from app.verification.step_verifier import create_step_verifier

            verifier = functools.partial(create_step_verifier, None)
            training = Training(config, prepared, dataset, None, on_progress, verifier)
            training.start(None)
            console.say(f"worker {workers.index}: training; worker 0 prints and saves the results")
            training.run()
    if not shares_terminal:
        console.say(f"worker {workers.index}: done")


def _naming_lost_peers(prepared: device_setup.Devices) -> contextlib.AbstractContextManager[None]:
    """Returns a context manager that names a lost worker in the error."""
    if prepared.cluster is None:
        return contextlib.nullcontext()
    from app.devices.rendezvous import naming_lost_peers

    return naming_lost_peers(prepared.cluster)


def _announce_to_others(prepared: device_setup.Devices, what: bytes) -> None:
    if prepared.workers:
        with _naming_lost_peers(prepared):
            prepared.workers.broadcast(what)


def _load_data(config: Config, prepared: device_setup.Devices) -> "ImageDataset":
    from app.data.dataset_loader import load_data

    dataset = load_data(config)
    rules.check_shards(config, len(prepared.names), dataset.num_train_examples)
    return dataset


def _announce(config: Config, prepared: device_setup.Devices, training: "Training") -> None:
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
    console.say(f"{shown} {', '.join(prepared.names)}")
    _warn_of_fault(config)
    if prepared.simulated and not config.distribution.num_gpus:  # That has a warning of its own.
        console.say("simulated devices: they share one processor, timing is not scaling")


def _warn_of_fault(config: Config) -> None:
    if config.verification.fault:
        console.warn(injected_fault_caveat(str(config.verification.fault)))


def _watch(
    config: Config, where: str, stacks: str
) -> contextlib.AbstractContextManager[Callable[[], None]]:
    """Ends a training without progress; see `watchdog.watch`."""
    timeout_sec = config.output.stall_timeout_sec
    stalled = StalledError(
        f"no progress for {timeout_sec} s (--stall_timeout_sec); run the same command again"
        f" {where}; the stacks of all threads are {stacks}"
    )
    return watchdog.watch(timeout_sec, stalled)
