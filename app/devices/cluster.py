"""Finds the workers that train together in the environment, waits for them and names lost ones."""

import contextlib
import dataclasses
import json
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from app import console
from app.devices.import_tf import import_tensorflow
from app.errors import ConfigError, PeerLostError, reason_of

if TYPE_CHECKING:
    from strategies.multi_worker import ClusterWorkers  # Imports TensorFlow.

_TF_CONFIG = '{"cluster": {"worker": ["host:port", …]}, "task": {"type": "worker", "index": 0}}'
# Ports of the workers of SLURM jobs; those of consecutive jobs are apart.
_FIRST_PORT, _NUM_PORTS, _PORTS_OF_A_JOB = 20_000, 10_000, 64
_START_SEC, _SEC_BETWEEN_LINES = 300.0, 10.0
_LOST = ("UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The worker processes that train together; the first is the chief, which writes files."""

    addresses: tuple[str, ...]  # "host:port" of each worker.
    index: int  # Of this process in `addresses`.

    @property
    def tf_config(self) -> str:
        """The value of TF_CONFIG for this cluster."""
        task = {"type": "worker", "index": self.index}
        return json.dumps({"cluster": {"worker": self.addresses}, "task": task})


def find_cluster(environ: Mapping[str, str] = os.environ) -> Cluster | None:
    """Returns the cluster of TF_CONFIG or, within `srun`, of SLURM's variables; None without."""
    if text := environ.get("TF_CONFIG"):
        return _cluster_of_tf_config(text)
    in_srun = all(map(environ.get, ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")))
    return _cluster_of_slurm(environ) if in_srun else None


def _cluster_of_tf_config(text: str) -> Cluster:
    """Reads TF_CONFIG; TensorFlow's own resolver raises a KeyError or accepts what is wrong."""
    key = f"the value {text:.80}"
    try:
        config = json.loads(text)
        key = "cluster"
        jobs = config["cluster"]
        addresses = tuple(jobs.get("chief", []) + jobs.get("worker", []))
        if not {*jobs} <= {"chief", "worker"}:
            raise ValueError
        for address in addresses:
            key = f"address {address!r} of cluster"
            if not re.fullmatch(r"\S+:[0-9]{1,5}", address) or addresses.count(address) > 1:
                raise ValueError
        task = config.get("task")
        key = f"task {json.dumps(task):.80}"
        if task["index"] < 0:
            raise ValueError
        return Cluster(addresses, addresses.index(jobs[task["type"]][task["index"]]))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"TF_CONFIG: {key} is missing or wrong; write it as in {_TF_CONFIG}, or unset it"
        ) from error


def _cluster_of_slurm(environ: Mapping[str, str]) -> Cluster:
    """Reads the variables that `srun` sets; all tasks derive the same port from the job id."""
    tf = import_tensorflow()
    try:
        port = _FIRST_PORT + int(environ.get("SLURM_JOB_ID") or 0) * _PORTS_OF_A_JOB % _NUM_PORTS
        # SLURM assigns the GPUs itself; with 0 of them the resolver would fail.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=port, gpus_per_node=_PORTS_OF_A_JOB, gpus_per_task=1, auto_set_gpu=False
        )
        addresses = tuple(resolver.cluster_spec().as_dict()["worker"])
        # It sorts hosts as text, node10 before node9: SLURM_PROCID would be another worker's.
        own = f"{environ['SLURMD_NODENAME']}:{port + int(environ['SLURM_LOCALID'])}"
        return Cluster(addresses, addresses.index(own))
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"SLURM's variables: {reason_of(error)}; start the workers with srun, which sets all"
            " of them, or set TF_CONFIG"
        ) from error


def wait_for_workers(cluster: Cluster) -> None:
    """Waits until every worker listens on its port, and names the missing ones meanwhile.

    TensorFlow's own call, whose server then uses the port, waits for a missing worker without a
    message or a limit, ignores SIGTERM, and shares the port with another process.
    """
    own = cluster.addresses[cluster.index]
    missing = others = [i for i in range(len(cluster.addresses)) if i != cluster.index]
    start, next_line, both = time.monotonic(), _SEC_BETWEEN_LINES, socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if both else socket.AF_INET
    try:
        port = int(own.rpartition(":")[2])
        listener = socket.create_server(("", port), family=family, dualstack_ipv6=both)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"port of {own}: {reason_of(error)}; stop the process that uses the port, or give"
            " another port on every worker"
        ) from error
    with listener:
        # A worker that has come may have been lost meanwhile: at the end all are asked again.
        while missing := _silent(cluster, missing) or _silent(cluster, others):
            names, waited_sec = _names(cluster.addresses, missing), time.monotonic() - start
            if waited_sec > _START_SEC:
                raise PeerLostError(
                    f"timed out after {_START_SEC:.0f} s waiting for {names}; check that it runs"
                    " with the same list of addresses, then run the same command again"
                )
            if waited_sec > next_line:
                next_line += _SEC_BETWEEN_LINES
                console.say(f"waiting for {names}, {waited_sec:.0f} s of {_START_SEC:.0f} s")
            time.sleep(0.1)


def _silent(cluster: Cluster, indices: list[int]) -> list[int]:
    """Returns the workers whose port does not accept a connection."""
    silent = []
    for index in indices:
        host, _, port = cluster.addresses[index].rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=1).close()
        except (OSError, OverflowError):
            silent.append(index)
    return silent


def _names(addresses: Sequence[str], indices: Iterable[int]) -> str:
    return ", ".join(f"worker {index} ({addresses[index]})" for index in indices)


@contextlib.contextmanager
def naming_lost_peers(workers: "ClusterWorkers") -> Iterator[None]:
    """Turns what TensorFlow raises when a worker is gone into a `PeerLostError` that names it."""
    try:
        yield
    except Exception as error:
        if type(error).__name__ not in _LOST:
            raise
        others = [index for index in range(workers.count) if index != workers.index]
        tasks = set(map(int, re.findall(r"/task:([0-9]+)", str(error))))
        lost = [index for index in others if index in tasks or len(others) == 1]
        raise PeerLostError(
            f"worker {workers.index} lost the connection to"
            f" {_names(workers.addresses, lost) or 'a worker'}; start all workers again with the"
            " same command to resume from the last checkpoint"
        ) from error
