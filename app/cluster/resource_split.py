"""Splits the cores, GPUs and ports of this machine among workers."""

import contextlib
import itertools
import os
import pathlib
import random
import re
import socket
from collections.abc import Sequence
from typing import NamedTuple

from app.config.distribution_options import DeviceOptions
from app.runtime.errors import DeviceError
from app.runtime.subprocesses import output_of

_DRIVER_GPUS = "/proc/driver/nvidia/gpus"
_PORT_RANGE = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST_PORT, _USUAL_FIRST_EPHEMERAL_PORT = 10_240, 32_768


class WorkerResources(NamedTuple):
    """Holds the resources of one worker.

    Attributes:
        cores: numbers of processor cores.
        gpus: names for CUDA_VISIBLE_DEVICES; None if no GPU is used.
    """

    cores: tuple[int, ...]
    gpus: tuple[str, ...] | None


def split_resources(
    num_workers: int, options: DeviceOptions, *, num_cores: int | None = None
) -> list[WorkerResources]:
    """Returns the resources of each worker: separate cores if there are enough, and GPUs.

    Args:
        num_workers: number of workers.
        options: the devices of each worker.
        num_cores: use at most this many cores.

    Raises:
        DeviceError: there are fewer GPUs than the workers need.
    """
    cores = _cores()[:num_cores]
    size = max(1, len(cores) // num_workers)
    starts = [index * size % len(cores) for index in range(num_workers)]
    per_worker_gpus = _share_gpus(num_workers, options)
    return [
        WorkerResources(tuple(cores[start : start + size]), gpus)
        for start, gpus in zip(starts, per_worker_gpus, strict=True)
    ]


def _share_gpus(num_workers: int, options: DeviceOptions) -> list[tuple[str, ...] | None]:
    gpus = [] if options.device == "cpu" else visible_gpus()
    if not gpus:  # The workers report this, as `train` does.
        return [None] * num_workers
    asked = options.num_devices_asked
    each = asked or len(gpus) // num_workers
    if each * num_workers > len(gpus) or not each:
        needed = each * num_workers or num_workers
        each_asked = f" with {asked} each" if asked else ""
        raise DeviceError(
            f"--num_workers={num_workers}{each_asked} needs {needed} GPUs, found {len(gpus)};"
            " use fewer workers, or --device=cpu"
        )
    return [tuple(gpus[i * each : (i + 1) * each]) for i in range(num_workers)]


def visible_gpus() -> list[str]:
    """Returns the CUDA names of the GPUs that are visible to this process."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name not in ("", "-1")]
    try:
        listed = output_of(["nvidia-smi", "-L"], timeout_sec=30)
    except OSError:
        # Containers often have no nvidia-smi; NVIDIA's driver has a directory for each GPU.
        return [str(i) for i, _ in enumerate(pathlib.Path(_DRIVER_GPUS).glob("*"))]
    return [str(i) for i, line in enumerate(listed.splitlines()) if line.startswith("GPU ")]


def gpu_uuids(names: Sequence[str]) -> list[str]:
    """Returns the UUIDs of GPUs that CUDA names by UUID or by number, as far as the driver tells.

    A UUID is the same in every container of a machine; a number is not.
    """
    try:
        listed = output_of(["nvidia-smi", "-L"], timeout_sec=30)
    except OSError:
        listed = ""
    known = dict(re.findall(r"^GPU (\d+): .*\(UUID: (\S+)\)", listed, re.MULTILINE))
    uuids = [next((u for u in known.values() if u.startswith(name)), name) for name in names]
    return [uuid for uuid in (known.get(u, u) for u in uuids) if not uuid.isdecimal()]


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def find_free_ports(count: int) -> list[int]:
    """Returns ports that are free now, and that the kernel gives to no other process.

    They are below the range from which it takes ports for connections: one of that range could be
    taken before the worker listens.
    """
    first = _first_ephemeral_port()
    candidates = iter(
        random.SystemRandom().sample(range(_LOWEST_PORT, first), first - _LOWEST_PORT)
    )
    return list(itertools.islice(filter(_is_free, candidates), count))


def _first_ephemeral_port() -> int:
    """Returns the first port that the kernel may choose itself."""
    with contextlib.suppress(OSError, ValueError):
        first = int(_PORT_RANGE.read_text(encoding="utf-8").split()[0])
        if first > 2 * _LOWEST_PORT:
            return first
    return _USUAL_FIRST_EPHEMERAL_PORT


def _is_free(port: int) -> bool:
    with socket.socket() as listener, contextlib.suppress(OSError):
        listener.bind(("", port))
        return True
    return False
