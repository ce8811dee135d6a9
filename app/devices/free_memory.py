"""Reads the free main memory."""

import contextlib
import pathlib
from collections.abc import Iterator
from typing import NamedTuple


class _Files(NamedTuple):
    """Where a version of control groups has the limit of a group, and the memory in use."""

    folder: str
    limit: str
    used: str
    prefix: str


_VERSION_1 = _Files(
    "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
)
_VERSION_2 = _Files("/sys/fs/cgroup", "memory.max", "memory.current", "")


def available_bytes() -> int | None:
    """Returns the main memory available to this process, in bytes; None if unknown."""
    found = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        free = _fields("/proc/meminfo")
        found.append(1024 * (free["MemAvailable:"] + free["SwapFree:"]))
    for group, files in _groups():
        with contextlib.suppress(OSError, KeyError, ValueError):  # A limit is "max" for none.
            limit, used = (int(_read(f"{group}/{name}")) for name in (files.limit, files.used))
            pages = _fields(f"{group}/memory.stat")
            # Pages of files count as used, but can be reclaimed.
            cached = (pages[f"{files.prefix}{kind}_file"] for kind in ("inactive", "active"))
            found.append(limit - used + sum(cached))
    return max(0, min(found)) if found else None


def _groups() -> Iterator[tuple[str, _Files]]:
    """Yields the control groups that may limit this process, for example of a job or a container.

    A container shows its own group as the root, and may name it as outside of the container.
    """
    own = {_VERSION_1: "", _VERSION_2: ""}
    with contextlib.suppress(OSError, ValueError):
        for line in _read("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controllers == "memory":
                own[_VERSION_1 if controllers else _VERSION_2] = path.rstrip("/")
    for files, path in own.items():
        while path:
            yield files.folder + path, files
            path = path.rpartition("/")[0]
        yield files.folder, files


def _fields(path: str) -> dict[str, int]:
    """Parses lines of a name and a number, with or without a unit."""
    return {words[0]: int(words[1]) for words in map(str.split, _read(path).splitlines())}


def _read(path: str) -> str:
    return pathlib.Path(path).read_text(encoding="utf-8")
