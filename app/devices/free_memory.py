"""Reads the free main memory, within the limits of control groups (`psutil` ignores them)."""

import contextlib
import pathlib
from collections.abc import Iterator

# Where each version of control groups has limit, use and statistics: the prefix of the latter, too.
_VERSION_1 = "/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"
_VERSION_2 = "/sys/fs/cgroup", "memory.max", "memory.current", ""


def available_bytes() -> int | None:
    """Returns the main memory available to this process, in bytes; None if unknown."""
    found = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        free = _fields("/proc/meminfo")
        found.append(1024 * (free["MemAvailable:"] + free["SwapFree:"]))
    for group, limit, used, prefix in _groups():
        with contextlib.suppress(OSError, KeyError, ValueError):  # A limit is "max" for none.
            pages = _fields(f"{group}/memory.stat")
            # Pages of files count as used, but can be reclaimed.
            cached = pages[f"{prefix}inactive_file"] + pages[f"{prefix}active_file"]
            found.append(int(_read(f"{group}/{limit}")) - int(_read(f"{group}/{used}")) + cached)
    return max(0, min(found)) if found else None


def _groups() -> Iterator[tuple[str, str, str, str]]:
    """Yields the control groups that may limit this process: its own and those above.

    A container shows its own group as the root, and may name it as outside of the container.
    """
    own = {_VERSION_1: "", _VERSION_2: ""}
    with contextlib.suppress(OSError, ValueError):
        for line in _read("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controllers == "memory":
                own[_VERSION_1 if controllers else _VERSION_2] = path
    for (root, limit, used, prefix), path in own.items():
        for place in [pathlib.PurePosixPath(path), *pathlib.PurePosixPath(path).parents]:
            yield f"{root}{place}".rstrip("/."), limit, used, prefix


def _fields(path: str) -> dict[str, int]:
    """Parses lines of a name and a number, with or without a unit."""
    return {words[0]: int(words[1]) for words in map(str.split, _read(path).splitlines())}


def _read(path: str) -> str:
    return pathlib.Path(path).read_text(encoding="utf-8")
