"""Connects the workers of a cluster and checks that they have the same settings."""

import contextlib
import json
import os
import re
import sys
from collections.abc import Iterator, Sequence

from app.cluster.environment import Cluster
from app.cluster.meeting import meet, names_of
from app.cluster.resource_split import gpu_uuids, visible_gpus
from app.config import TrainConfig
from app.runtime import console, signals
from app.runtime.errors import ConfigError, PeerLostError
from app.runtime.subprocesses import Subprocess, child_environment
from app.runtime.versions import versions
from strategies.collective_cluster import ClusterWorkers
from strategies.multi_worker import default_all_reduce

# Names of the exceptions that TensorFlow raises in a worker whose peer is lost; names, so that
# TensorFlow is not imported for them.
_LOST = ("UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError")
# Fields that may differ between workers: paths and display.
_OWN = (
    *("out", "overwrite", "data_dir", "case"),
    *("verbosity", "start_timeout_sec", "stall_timeout_sec"),
)
# Fields of a case that must be equal: its text and the name of its function.
_OF_A_CASE = ("case_sha256", "model_fn")


def join(cluster: Cluster, local_devices: Sequence[str], config: TrainConfig) -> ClusterWorkers:
    """Connects this worker with the others; call it before TensorFlow runs any operation.

    Args:
        cluster: the workers.
        local_devices: devices of this worker.
        config: the same on every worker, except for paths and display.

    Raises:
        ConfigError: the port is in use, or workers have different flags, devices or versions.
        PeerLostError: a worker did not connect within `config.start_timeout_sec`, or was lost.
    """
    if cluster.is_chief:
        console.say(
            f"cluster of {console.count(len(cluster.addresses), 'worker')} from {cluster.source}:"
            f" {', '.join(cluster.addresses)}"
        )
    meet(cluster, config.start_timeout_sec)
    auto = config.all_reduce == "auto"
    all_reduce = default_all_reduce(local_devices) if auto else config.all_reduce
    with naming_lost_peers(cluster), _ended_after(config.start_timeout_sec):
        workers = ClusterWorkers(cluster.addresses, cluster.index, local_devices, all_reduce)
    signals.reinstall()
    with naming_lost_peers(cluster):
        gpus = _gpus_of(local_devices)
        posted = workers.post(json.dumps([_settings(config, local_devices), gpus]))
        workers.post("read")  # Every worker has read the others' settings before any of them exits.
        settings, per_worker_gpus = zip(*(json.loads(text) for text in posted), strict=True)
        _check_same(settings)
        _check_own_gpus(per_worker_gpus)
    return workers


_WATCHER = """
import os, signal, sys, time
time.sleep(float(sys.argv[2]))
sys.stderr.write(sys.argv[3])
sys.stderr.flush()
os.kill(int(sys.argv[1]), signal.SIGKILL)
"""


@contextlib.contextmanager
def _ended_after(timeout_sec: float) -> Iterator[None]:
    """Ends this process from outside if what it does takes too long.

    A worker that is lost just after it came leaves TensorFlow's call waiting, which holds Python's
    lock: no thread of ours could end it.
    """
    text = (
        f"error: --start_timeout_sec={timeout_sec}: a worker connected and was lost; run the same"
        " command again\n"
    )
    command = [sys.executable, "-IS", "-c", _WATCHER, str(os.getpid()), str(timeout_sec), text]
    watcher = Subprocess(command, child_environment(), is_silent=True)
    try:
        yield
    finally:
        watcher.end(grace_sec=0)


def _settings(config: TrainConfig, local_devices: Sequence[str]) -> dict:
    """Returns the settings that must be equal on all workers."""
    flags = {f"--{name}": value for name, value in vars(config).items() if name not in _OWN}
    kind = "GPU" if "GPU" in local_devices[0] else "CPU"
    own = {f"version of {name}": version for name, version in versions().items()}
    fields = config.result_fields()
    case = {name: fields[name] for name in _OF_A_CASE if name in fields}
    return {**flags, **case, "devices": f"{len(local_devices)} {kind}", **own}


def _gpus_of(local_devices: Sequence[str]) -> list[str]:
    """Returns the UUIDs of this worker's GPUs, as far as they are known."""
    if "GPU" not in local_devices[0]:
        return []
    return gpu_uuids(visible_gpus()[: len(local_devices)])


def _check_own_gpus(per_worker: Sequence[Sequence[str]]) -> None:
    """Refuses workers that share a GPU.

    Raises:
        ConfigError: two workers use the same GPU.
    """
    users: dict[str, int] = {}
    for index, uuids in enumerate(per_worker):
        for uuid in uuids:
            if users.setdefault(uuid, index) != index:
                raise ConfigError(
                    f"workers {users[uuid]} and {index} share {uuid}; give each worker its own GPUs"
                    " with CUDA_VISIBLE_DEVICES, or start them with launch"
                )


def _check_same(per_worker: Sequence[dict]) -> None:
    """Refuses workers that would not make the same steps.

    Raises:
        ConfigError: some have other flags, devices or versions than the chief.
    """
    chief, *others = per_worker
    differing = [
        f"{name}: worker 0 has {chief.get(name)}, worker {index} has {other.get(name)}"
        for index, other in enumerate(others, start=1)
        for name in {**chief, **other}
        if chief.get(name) != other.get(name)
    ]
    if differing:
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigError(
            f"workers differ ({'; '.join(differing[:3])}{more}); start all of them with the"
            " same flags, devices and versions"
        )


@contextlib.contextmanager
def naming_lost_peers(cluster: Cluster | None) -> Iterator[None]:
    """Turns what TensorFlow raises when a worker is gone into one line that names it.

    Raises:
        PeerLostError: it is.
    """
    try:
        yield
    except Exception as error:
        if cluster is None or type(error).__name__ not in _LOST:
            raise
        raise _lost(cluster, str(error)) from error


def _lost(cluster: Cluster, text: str) -> PeerLostError:
    tasks = {int(task) for task in re.findall(r"/task:([0-9]+)", text)} - {cluster.index}
    known = sorted(task for task in tasks if task < len(cluster.addresses))
    who = names_of(cluster, known) if known else "a worker"
    return PeerLostError(
        f"worker {cluster.index} lost the connection to {who}; start all workers again with"
        " the same command to resume from the last checkpoint"
    )
