"""Measures the peak memory of a process, or of the GPUs that it uses."""

import contextlib
import pathlib
import re
import resource
from collections.abc import Sequence
from typing import NamedTuple


class PeakMemory(NamedTuple):
    """The peak memory.

    Attributes:
        peak_bytes: peak of the process, or of all its GPUs together.
        steps_bytes: peak during steps minus memory before the first step; None if unknown.
    """

    peak_bytes: int
    steps_bytes: int | None

    def plus(self, other: "PeakMemory") -> "PeakMemory":
        """Returns the sum over two processes."""
        steps_bytes = None
        if self.steps_bytes is not None and other.steps_bytes is not None:
            steps_bytes = self.steps_bytes + other.steps_bytes
        return PeakMemory(self.peak_bytes + other.peak_bytes, steps_bytes)


class PeakMemoryMeter:
    """Measures peak memory from just before the first step.

    Args:
        devices: devices of this process's replicas.
    """

    def __init__(self, devices: Sequence[str]):
        self._gpus = [name.rpartition("/device:")[2] for name in devices if "GPU" in name]
        self._earlier_bytes, self._before = _process_peak_bytes(), self._start()

    def _start(self) -> int | None:
        """Resets the peak; returns the current memory, None if unknown."""
        if self._gpus:
            import tensorflow as tf

            for name in self._gpus:
                tf.config.experimental.reset_memory_stats(name)
            return self._of_gpus("current")
        with contextlib.suppress(OSError):  # Not Linux, or the kernel does not permit it.
            pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
            return _status_bytes("VmRSS")
        return None

    def peak(self) -> PeakMemory:
        """Returns the peak memory so far."""
        on_gpus = bool(self._gpus)
        peak = self._of_gpus("peak") if on_gpus else max(self._earlier_bytes, _process_peak_bytes())
        if self._before is None:
            return PeakMemory(peak, None)
        if on_gpus:
            return PeakMemory(peak, peak - self._before)
        return PeakMemory(peak, max(0, _status_bytes("VmHWM") - self._before))

    def _of_gpus(self, what: str) -> int:
        import tensorflow as tf

        return sum(tf.config.experimental.get_memory_info(name)[what] for name in self._gpus)


def _process_peak_bytes() -> int:
    with contextlib.suppress(OSError, ValueError):
        return _status_bytes("VmHWM")
    # Without /proc; a new process starts with its parent's value.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts in KiB.


def _status_bytes(name: str) -> int:
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    (size,) = re.findall(rf"^{name}:\s+(\d+) kB$", text, re.MULTILINE)
    return int(size) * 1024
