"""Reads the free main memory."""

import contextlib
import pathlib


def available_bytes() -> int | None:
    """Returns the main memory available to this process, in bytes; None if unknown."""
    found = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        free = _fields("/proc/meminfo")
        found.append(1024 * (free["MemAvailable:"] + free["SwapFree:"]))
    group = "/sys/fs/cgroup"  # A container's limit; "max" for none.
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit, used = (int(_read(f"{group}/{name}")) for name in ("memory.max", "memory.current"))
        pages = _fields(f"{group}/memory.stat")
        # Pages of files count as used, but can be reclaimed.
        found.append(limit - used + pages["inactive_file"] + pages["active_file"])
    return min(found, default=None)


def _fields(path: str) -> dict[str, int]:
    """Parses lines of a name and a number, with or without a unit."""
    return {words[0]: int(words[1]) for words in map(str.split, _read(path).splitlines())}


def _read(path: str) -> str:
    return pathlib.Path(path).read_text(encoding="utf-8")
