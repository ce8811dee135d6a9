"""`train`: runs one training in one directory."""

import contextlib
import os
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING

from app.devices import device_setup
from app.devices.cluster import Cluster, find_cluster, is_in_cluster
from app.options import Config, rules
from app.options.names import DEFAULT_LOCAL_WORKERS
from app.records.caveats import caveats, injected_fault_caveat
from app.records.checkpoint import checkpoint_paths, load_manifest
from app.records.history import Summary, load_required_summary, load_summary
from app.records.run_directory import (
    LOG_FILE,
    RunDirectory,
    default_out,
    load_run_config,
    named_path,
    open_log,
    open_run_directory,
    unresolved_settings,
)
from app.runtime import console, watchdog
from app.runtime.errors import CheckpointError, ConfigError, OutputError, StalledError
from app.training.resume import accepted_changes

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
        summary = _find_result(config, run_directory)
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
    return load_required_summary(path)


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


def _find_result(config: Config, run_directory: RunDirectory) -> Summary | None:
    """Returns the result of a finished run in the directory; None if there is still to train.

    Also None if a default has become a value or the other way round: the training compares values.

    Raises:
        CheckpointError: the run in the directory has another configuration.
    """
    if config.output.overwrite or not run_directory.is_started:
        return None
    path = run_directory.path
    old, new = load_run_config(path), run_directory.config
    unresolved = unresolved_settings(old, new)
    known = [{n: v for n, v in each.items() if n not in unresolved} for each in (old, new)]
    changed = accepted_changes(path, *known)
    try:
        summary = load_summary(path)
    except OutputError as error:  # The summary is rebuilt from the checkpoint.
        console.warn(error.problem)
        return None
    if summary is None or summary.status != "finished" or summary.epochs != config.training.epochs:
        return None
    if not _is_of_newest_checkpoint(summary, path):
        console.warn(f"{path}: the summary is not that of the newest checkpoint; it is rewritten")
        return None
    asked, found = config.num_devices_of_all_workers, len(summary.devices)
    if config.distribution.strategy == "multi_worker" and config.num_devices_asked:
        asked = config.num_devices_asked * len(find_cluster(os.environ).addresses)
    differing = list(changed.values())
    if asked not in (None, found):
        differing.append(f"devices {found} → {asked}")
    if differing:
        raise CheckpointError(
            f"--out={path} holds a finished run of another configuration"
            f" ({'; '.join(differing)}); choose"
            " another directory, raise --epochs to continue, or use --overwrite"
        )
    return None if unresolved else summary


def _is_of_newest_checkpoint(summary: Summary, path: pathlib.Path) -> bool:
    """Returns whether a summary has the results of the newest checkpoint, if it can be read."""
    for newest in checkpoint_paths(path)[-1:]:
        with contextlib.suppress(Exception):  # Only the summary is needed.
            results = load_manifest(newest)[1].results()
            return all(getattr(summary, name) == value for name, value in results.items())
    return True


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

        training = Training(config, prepared, dataset, path, on_progress)
        training.verifier = create_step_verifier(training.spec, training.strategy, path)
        training.start(from_scratch=config.output.overwrite)
        kernels = training.cpu_kernels
        run_directory.start(overwrite=config.output.overwrite, cpu_kernels=kernels)
        console.log(f"Kernels of the CPU: {kernels}")
        _announce(config, prepared, training)
        return training.run()


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

            training = Training(config, prepared, dataset, None, on_progress)
            training.verifier = create_step_verifier(training.spec, training.strategy, None)
            training.start(from_scratch=config.output.overwrite)
            console.say(f"worker {workers.index}: training; worker 0 prints and saves the results")
            training.assist()
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
    dataset = training.dataset
    console.say(
        f"{config.distribution.strategy}: {config.training.model} on {dataset.name},"
        f" {dataset.num_train_examples:,} training images"
    )
    console.say(
        f"{console.count(config.training.epochs, 'epoch')} of"
        f" {console.count(training.steps_per_epoch, 'step')}, recipe {config.training.recipe},"
        f" batch {config.training.global_batch_size}, {training.spec.rate_text()}"
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
