"""Checks the processor and the memory."""

import os
import pathlib
import platform
import re
from typing import NamedTuple

from app.devices.device_setup import num_cores
from app.devices.free_memory import available_bytes
from app.doctor.check import NOTE, WARNING, Check
from app.runtime import console
from app.runtime.shown_command import shown_command

_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
_CPU_MAX = "sys/fs/cgroup/cpu.max"
# Control groups version 1 have the two numbers in separate files.
_CPU_QUOTA = "sys/fs/cgroup/cpu/cpu.cfs_quota_us", "sys/fs/cgroup/cpu/cpu.cfs_period_us"
_LEAST_MEMORY_BYTES = 2 << 30  # TensorFlow, the images and LeNet's replicas.


class Processor(NamedTuple):
    """The processor as Linux reports it.

    Attributes:
        model: name of the model, or of the architecture.
        features: names of its features; empty if unknown.
    """

    model: str
    features: frozenset[str]

    @classmethod
    def of_this_machine(cls, root: pathlib.Path = pathlib.Path("/")) -> "Processor":
        """Reads /proc/cpuinfo, if it exists."""
        try:
            text = (root / "proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
        except OSError:  # macOS.
            text = ""
        fields = dict(re.findall(r"^([^:\n]+?)\s*: (.*)$", text, re.MULTILINE))
        model = fields.get("model name") or fields.get("Hardware") or platform.processor()
        features = fields.get("flags") or fields.get("Features") or ""
        return cls(model or platform.machine(), frozenset(features.split()))


def check_processor(root: pathlib.Path = pathlib.Path("/")) -> list[Check]:
    """Checks processor, cores and memory.

    Args:
        root: root of the file system.
    """
    processor = Processor.of_this_machine(root)
    checks = [Check("processor", f"{processor.model}, {platform.machine()}"), _check_cores(root)]
    return [*checks, _check_features(processor), _check_memory(available_bytes())]


def _check_cores(root: pathlib.Path) -> Check:
    cores, there, quota = num_cores(), os.cpu_count() or 1, cpu_quota(root)
    shown = console.count(cores, "core") + (f" of {there}" if there != cores else "")
    if quota is None or quota >= cores:
        return Check("cores", shown)
    fewer = max(1, int(quota))
    return Check(
        "cores",
        f"{shown}, but the container's quota is {quota:g}",
        WARNING,
        "as many threads as cores only wait for each other; start it with"
        f" taskset -c 0-{fewer - 1} {shown_command([])} …",
    )


def cpu_quota(root: pathlib.Path = pathlib.Path("/")) -> float | None:
    """Returns the control group's limit in cores; None without a limit."""
    try:
        quota, period = (root / _CPU_MAX).read_text(encoding="ascii").split()
    except (OSError, ValueError):
        try:
            quota, period = ((root / name).read_text(encoding="ascii") for name in _CPU_QUOTA)
        except OSError:
            return None
    try:
        cores = int(quota) / int(period)
    except (ValueError, ZeroDivisionError):  # "max".
        return None
    return cores if cores > 0 else None


def _check_features(processor: Processor) -> Check:
    """Reports whether bfloat16 is useful here, where measurements exist."""
    has = [name for name in _FEATURES if name in processor.features]
    shown = ", ".join(has) or "none of those that matter here are known"
    flag = "--precision=mixed_bfloat16"
    if "avx512_bf16" in has:
        measured = "on two cores like that a step of LeNet took 18.9 ms in place of 31.1"
        return Check("features", f"{shown}: {flag} pays ({measured})")
    if "amx_bf16" in has:
        return Check("features", f"{shown}: {flag} should be faster; benchmark measures it")
    if has:
        told = f"{shown}; no avx512_bf16 or amx_bf16, so {flag} should not pay; keep float32"
        return Check("features", told, NOTE)
    return Check("features", f"{shown}: whether {flag} pays is for benchmark to tell", NOTE)


def _check_memory(available: int | None) -> Check:
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        shown = f"{total / 2**30:.1f} GiB"
    except (OSError, ValueError):
        shown = "of unknown size"
    if available is None:
        return Check("memory", f"{shown}; how much is free is not known", NOTE)
    shown += f", {available / 2**30:.1f} available"
    if available < _LEAST_MEMORY_BYTES:
        return Check("memory", shown, WARNING, "LeNet needs 2 GiB; end other programs")
    return Check("memory", shown)
