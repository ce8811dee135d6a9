"""Reads the cluster from the environment, and checks it before TensorFlow starts."""

import dataclasses
import json
import pathlib
import re
import secrets
from collections.abc import Mapping

from app.runtime.errors import ConfigError, reason_of
from app.runtime.run_context import PART_VARIABLE
from app.runtime.shown_command import shown_command

_JOBS = ("chief", "worker")
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST")
_FIRST_SLURM_PORT, _NUM_SLURM_PORTS = 20_000, 10_000
_TASKS_OF_A_JOB = 64  # Keeps the ports of consecutive jobs apart.
_LARGEST_PORT = 65_535
SECRET_VARIABLE, SECRET_FILE_VARIABLE = "LOCKSTEP_SECRET", "LOCKSTEP_SECRET_FILE"
_SHORTEST_SECRET, _LONGEST_SECRET = 16, 4096
_RANDOM_BYTES = 32


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Describes the worker processes that train together.

    Attributes:
        addresses: "host:port" of each worker, the chief first.
        index: index of this process in `addresses`.
        source: name of the variables that define the cluster, for messages.
        secret: what a process must know to join; empty admits every process of this program.
    """

    addresses: tuple[str, ...]
    index: int
    source: str = ""
    secret: bytes = dataclasses.field(default=b"", repr=False)

    @property
    def is_chief(self) -> bool:
        """Whether this is the worker that writes files."""
        return self.index == 0

    @property
    def address(self) -> str:
        """The "host:port" of this worker."""
        return self.addresses[self.index]

    @property
    def num_machines(self) -> int:
        """The number of machines, by distinct hosts."""
        return len({host_and_port(address)[0] for address in self.addresses})

    @property
    def shares_machines(self) -> bool:
        """Whether several workers share a machine, so that times do not show scaling."""
        return self.num_machines < len(self.addresses)

    def as_environment(self) -> dict[str, str]:
        """Returns the environment variables in which `find_cluster` finds this cluster."""
        environment = {"TF_CONFIG": self.as_tf_config()}
        return environment | ({SECRET_VARIABLE: self.secret.decode()} if self.secret else {})

    def as_tf_config(self) -> str:
        """Returns the TF_CONFIG value from which `find_cluster` creates this cluster."""
        task = {"type": "worker", "index": self.index}
        return json.dumps({"cluster": {"worker": list(self.addresses)}, "task": task})


def find_cluster(environ: Mapping[str, str]) -> Cluster:
    """Reads the cluster from TF_CONFIG or, within `srun`, from SLURM's variables.

    Raises:
        ConfigError: no cluster is defined, or its definition is invalid; names the bad key.
    """
    if environ.get("TF_CONFIG"):
        source = "launch" if PART_VARIABLE in environ else "TF_CONFIG"
        cluster = _from_tf_config(environ["TF_CONFIG"], source)
        return dataclasses.replace(cluster, secret=find_secret(environ))
    if all(environ.get(name) for name in SLURM_VARIABLES):
        return dataclasses.replace(_from_slurm(environ), secret=find_secret(environ))
    raise ConfigError(
        "--strategy=multi_worker found no cluster: neither TF_CONFIG nor SLURM's variables are set;"
        f" on one machine use: {shown_command(['launch', '--num_workers=2'])}"
    )


def find_secret(environ: Mapping[str, str]) -> bytes:
    """Reads the secret that all workers share; empty without one.

    It is the text of LOCKSTEP_SECRET, or of the file that LOCKSTEP_SECRET_FILE names.

    Raises:
        ConfigError: the file cannot be read, or the secret is too short.
    """
    text, source = environ.get(SECRET_VARIABLE, ""), SECRET_VARIABLE
    if not text and environ.get(SECRET_FILE_VARIABLE):
        path = pathlib.Path(environ[SECRET_FILE_VARIABLE])
        source = f"{SECRET_FILE_VARIABLE}={path}"
        try:
            if path.exists() and not path.is_file():  # Kubernetes mounts a link to a file.
                raise ValueError("not a file")
            with open(path, "rb") as file:
                text = file.read(_LONGEST_SECRET + 1).decode()
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{source}: {reason_of(error)}; name a file with the secret of the cluster"
            ) from error
    elif not text:
        return b""
    secret = text.strip().encode()
    if not _SHORTEST_SECRET <= len(secret) <= _LONGEST_SECRET:
        raise ConfigError(
            f"{source} must have {_SHORTEST_SECRET} to {_LONGEST_SECRET} characters, got"
            f" {len(secret)}; generate one with: openssl rand -hex 32"
        )
    return secret


def new_secret() -> bytes:
    """Returns a random secret for the workers of one start."""
    return secrets.token_hex(_RANDOM_BYTES).encode()


def host_and_port(address: str) -> tuple[str, int]:
    """Splits "host:port"; an IPv6 host is in brackets.

    Raises:
        ValueError: the address does not have this form.
    """
    match = re.fullmatch(r"(\[[0-9A-Fa-f:.%]+\]|[^\s:/\[\]]+):([0-9]{1,5})", address)
    if not match or not 1 <= int(match[2]) <= _LARGEST_PORT:
        raise ValueError(f"{address!r} is not host:port")
    return match[1].strip("[]"), int(match[2])


def _from_tf_config(text: str, source: str) -> Cluster:
    def refuse(key: str, value: object, required: str) -> ConfigError:
        shown = json.dumps(value) if not isinstance(value, str) else value
        shown = shown if len(shown) <= 80 else f"{shown[:80]}…"
        return ConfigError(
            f"TF_CONFIG: {key} {shown}{required and f', not {required}'}; correct the variable,"
            " or unset it and use launch"
        )

    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refuse("is not JSON:", text, "") from error
    if not isinstance(config, dict):
        raise refuse("is", config, "a JSON object")
    jobs, task = config.get("cluster"), config.get("task")
    if not isinstance(jobs, dict) or not jobs:
        raise refuse("cluster is", jobs, 'an object such as {"worker": ["host:port"]}')
    if not isinstance(task, dict):
        raise refuse("task is", task, 'an object such as {"type": "worker", "index": 0}')
    for job, addresses in jobs.items():
        if job not in _JOBS:
            raise refuse("cluster has the job", job, f"one of {', '.join(_JOBS)}")
        if not isinstance(addresses, list) or not addresses:
            raise refuse(f"cluster.{job} is", addresses, "a list of host:port")
        for position, address in enumerate(addresses):
            key = f"cluster.{job}[{position}]"
            try:
                host_and_port(address)
            except (TypeError, ValueError) as error:
                raise refuse(f"{key} is", address, "host:port") from error
    if len(jobs.get("chief", ["one"])) != 1:
        raise refuse("cluster.chief is", jobs["chief"], "one chief")
    addresses = [address for job in _JOBS for address in jobs.get(job, [])]
    for address in addresses:
        if addresses.count(address) > 1:
            raise refuse("cluster has twice", address, "an address of its own for each worker")
    kind, index = task.get("type"), task.get("index")
    if not isinstance(kind, str) or kind not in jobs:
        raise refuse("task.type is", kind, f"one of {', '.join(jobs)}")
    if type(index) is not int or not 0 <= index < len(jobs[kind]):
        raise refuse("task.index is", index, f"0 to {len(jobs[kind]) - 1}")
    before = len(jobs.get("chief", [])) if kind == "worker" else 0
    return Cluster(tuple(addresses), before + index, source)


def _from_slurm(environ: Mapping[str, str]) -> Cluster:
    """Reads the variables that `srun` sets; all tasks derive the same port from the job id."""

    def number(name: str) -> int:
        value = environ.get(name, "")
        if not re.fullmatch("[0-9]{1,9}", value):
            raise ConfigError(f"{name}={value} is not a whole number; start the workers with srun")
        return int(value)

    index, count = number("SLURM_PROCID"), number("SLURM_STEP_NUM_TASKS")
    hosts = _expand_hosts(environ["SLURM_STEP_NODELIST"])
    tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", f"1(x{count})" if count == len(hosts) else "")
    per_host = _expand_counts(tasks)
    if len(per_host) != len(hosts) or sum(per_host) != count or index >= count:
        raise ConfigError(
            f"SLURM_STEP_TASKS_PER_NODE={tasks} on"
            f" SLURM_STEP_NODELIST={environ['SLURM_STEP_NODELIST']} does not fit"
            f" SLURM_STEP_NUM_TASKS={count} and SLURM_PROCID={index}; start the workers with"
            " srun, which sets all of them"
        )
    job = number("SLURM_JOB_ID") if environ.get("SLURM_JOB_ID") else 0
    first = _FIRST_SLURM_PORT + job * _TASKS_OF_A_JOB % _NUM_SLURM_PORTS
    addresses = tuple(
        f"{host}:{first + task}"
        for host, n in zip(hosts, per_host, strict=True)
        for task in range(n)
    )
    return Cluster(addresses, index, "SLURM")


def _expand_hosts(text: str) -> list[str]:
    """Expands "a[01-03,7],b" into a list of hosts."""
    hosts = []
    for word in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", text):
        match = re.fullmatch(r"([^\[\]]*)\[([0-9,\-]+)\]([^\[\]]*)", word)
        if not match:
            if not re.fullmatch(r"[\w.\-]+", word):
                raise _bad_hosts(text)
            hosts.append(word)
            continue
        for part in match[2].split(","):
            bounds = re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part)
            if not bounds or int(bounds[2] or bounds[1]) - int(bounds[1]) not in range(100_000):
                raise _bad_hosts(text)
            first, last = bounds[1], bounds[2] or bounds[1]
            hosts += [
                f"{match[1]}{number:0{len(first)}d}{match[3]}"
                for number in range(int(first), int(last) + 1)
            ]
    return hosts


def _bad_hosts(text: str) -> ConfigError:
    return ConfigError(
        f"SLURM_STEP_NODELIST={text} is not a list of hosts such as node[01-04],gpu7; set"
        " TF_CONFIG instead"
    )


def _expand_counts(text: str) -> list[int]:
    """Expands "2(x3),1" into 2, 2, 2, 1; returns an empty list for any other form."""
    counts = []
    for part in text.split(","):
        match = re.fullmatch(r"([0-9]{1,6})(?:\(x([0-9]{1,6})\))?", part)
        if not match:
            return []
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
