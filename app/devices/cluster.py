"""Finds the workers that train together, and their common secret, in the environment."""

import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Iterable, Mapping

from app.runtime.errors import ConfigError, reason_of

SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
SECRET_VARIABLE, SECRET_FILE_VARIABLE = "LOCKSTEP_SECRET", "LOCKSTEP_SECRET_FILE"
_SHORTEST_SECRET, _LONGEST_SECRET = 16, 4096
# Ports of the workers of SLURM jobs; those of consecutive jobs are apart.
_FIRST_PORT, _NUM_PORTS, _PORTS_OF_A_JOB = 20_000, 10_000, 64


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The worker processes that train together.

    Attributes:
        addresses: "host:port" of each worker, the chief first.
        index: index of this process in `addresses`.
        source: name of the variables that define the cluster, for messages.
        secret: what a process must know to join; "" admits every process of this program.
    """

    addresses: tuple[str, ...]
    index: int
    source: str = "TF_CONFIG"
    secret: str = dataclasses.field(default="", repr=False)

    @property
    def is_chief(self) -> bool:
        """Whether this is the worker that writes files."""
        return self.index == 0

    @property
    def shares_machines(self) -> bool:
        """Whether several workers share a machine, so that times do not show scaling."""
        return len({host_and_port(each)[0] for each in self.addresses}) < len(self.addresses)

    def names_of(self, indices: Iterable[int]) -> str:
        """Returns workers with their addresses, for messages."""
        return ", ".join(f"worker {index} ({self.addresses[index]})" for index in indices)

    def as_environment(self) -> dict[str, str]:
        """Returns the environment variables in which `find_cluster` finds this cluster."""
        task = {"type": "worker", "index": self.index}
        config = {"cluster": {"worker": list(self.addresses)}, "task": task}
        return {"TF_CONFIG": json.dumps(config), SECRET_VARIABLE: self.secret}


def is_in_cluster(environ: Mapping[str, str] = os.environ) -> bool:
    """Returns whether TF_CONFIG or SLURM's variables define a cluster."""
    return bool(environ.get("TF_CONFIG")) or all(map(environ.get, SLURM_VARIABLES))


def find_cluster(environ: Mapping[str, str] = os.environ) -> Cluster:
    """Reads the cluster from TF_CONFIG or, within `srun`, from SLURM's variables.

    Raises:
        ConfigError: no cluster is defined, or its definition is invalid; names the bad key.
    """
    if not is_in_cluster(environ):
        raise ConfigError("found no cluster: neither TF_CONFIG nor SLURM's variables are set")
    text = environ.get("TF_CONFIG")
    cluster = _from_tf_config(text) if text else _from_slurm(environ)
    return dataclasses.replace(cluster, secret=_find_secret(environ))


def host_and_port(address: object) -> tuple[str, int]:
    """Splits "host:port"; an IPv6 host is in brackets.

    Raises:
        ValueError: the address does not have this form.
    """
    form = r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})"
    match = re.fullmatch(form, address) if isinstance(address, str) else None
    if not match or not 1 <= int(match[2]) <= 65_535:
        raise ValueError(f"{address!r} is not host:port")
    return match[1].strip("[]"), int(match[2])


def _find_secret(environ: Mapping[str, str]) -> str:
    """Returns the text of LOCKSTEP_SECRET or of the file LOCKSTEP_SECRET_FILE; "" without one."""
    text, source = environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE
    if not text and (path := environ.get(SECRET_FILE_VARIABLE)):
        source = f"{SECRET_FILE_VARIABLE}={path}"
        try:
            if not pathlib.Path(path).is_file():
                raise ValueError("not a file")
            with open(path, "rb") as file:
                text = file.read(_LONGEST_SECRET + 1).decode()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{source}: {reason_of(error)}; name a file with a secret") from error
    elif not text:
        return ""
    secret = text.strip()
    if not _SHORTEST_SECRET <= len(secret) <= _LONGEST_SECRET:
        raise ConfigError(
            f"{source} must have {_SHORTEST_SECRET} to {_LONGEST_SECRET} characters, got"
            f" {len(secret)}; generate one with: openssl rand -hex 32"
        )
    return secret


def _from_tf_config(text: str) -> Cluster:
    """Reads TF_CONFIG; TensorFlow's own resolver raises a KeyError or accepts what is wrong."""

    def check(is_right: object, key: str, value: object, required: str) -> None:
        if not is_right:
            shown = value if isinstance(value, str) else json.dumps(value)
            shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
            raise ConfigError(
                f"TF_CONFIG: {key} is {shown}, not {required}; correct the variable or unset it"
            )

    try:
        config = json.loads(text)
    except (ValueError, RecursionError):
        config = text
    check(isinstance(config, dict), "the value", config, "a JSON object")
    jobs, task = config.get("cluster"), config.get("task")
    check(isinstance(jobs, dict) and jobs, "cluster", jobs, '{"worker": ["host:port", …]}')
    check(isinstance(task, dict), "task", task, '{"type": "worker", "index": 0}')
    check({*jobs} <= {"chief", "worker"}, "a job of cluster", [*jobs], "chief or worker")
    for job, addresses in jobs.items():
        check(isinstance(addresses, list) and addresses, f"cluster.{job}", addresses, "a list")
        for position, address in enumerate(addresses):
            try:
                host_and_port(address)
            except ValueError:
                check(False, f"cluster.{job}[{position}]", address, "host:port")
    chief, workers = jobs.get("chief", []), jobs.get("worker", [])
    check(len(chief) <= 1, "cluster.chief", chief, "one address")
    unique = len({*chief, *workers}) == len(chief) + len(workers)
    check(unique, "cluster", jobs, "a list of addresses that differ")
    kind, index = task.get("type"), task.get("index")
    check(isinstance(kind, str) and kind in jobs, "task.type", kind, " or ".join(jobs))
    last = len(jobs[kind]) - 1
    check(type(index) is int and 0 <= index <= last, "task.index", index, f"0 to {last}")
    return Cluster((*chief, *workers), index + (len(chief) if kind == "worker" else 0))


def _from_slurm(environ: Mapping[str, str]) -> Cluster:
    """Reads the variables that `srun` sets; all tasks derive the same port from the job id."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    try:
        job = int(environ.get("SLURM_JOB_ID") or 0)
        port = _FIRST_PORT + job * _PORTS_OF_A_JOB % _NUM_PORTS
        # SLURM assigns the GPUs itself; with 0 of them the resolver would fail.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=port, gpus_per_node=_PORTS_OF_A_JOB, gpus_per_task=1, auto_set_gpu=False
        )
        addresses = tuple(resolver.cluster_spec().as_dict()["worker"])
        # It sorts hosts as text, node10 before node9: SLURM_PROCID would be another worker's.
        own = f"{environ['SLURMD_NODENAME']}:{port + int(environ['SLURM_LOCALID'])}"
        return Cluster(addresses, addresses.index(own), "SLURM")
    except (KeyError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"SLURM's variables: {reason_of(error)}; start the workers with srun, which sets all"
            " of them, or set TF_CONFIG"
        ) from error
