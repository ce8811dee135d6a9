"""Measures the peak memory of a process, or of the GPUs that it uses."""

import contextlib
import pathlib
import re
import resource
from collections.abc import Sequence


def reset_peak(devices: Sequence[str]) -> None:
    """Forgets the earlier peak of GPUs."""
    import tensorflow as tf

    for name in _gpus(devices):
        tf.config.experimental.reset_memory_stats(name)


def peak_memory_bytes(devices: Sequence[str]) -> int:
    """Returns the peak memory of the GPUs among `devices`, else of this process."""
    gpus = _gpus(devices)
    if gpus:
        import tensorflow as tf

        return sum(tf.config.experimental.get_memory_info(name)["peak"] for name in gpus)
    with contextlib.suppress(OSError, ValueError):
        text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
        (peak_kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
        return int(peak_kib) * 1024
    # Without /proc; a new process starts with its parent's value.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB.


def _gpus(devices: Sequence[str]) -> list[str]:
    return [name.rpartition("/device:")[2] for name in devices if "GPU" in name]
