"""How much main memory there is left."""

import contextlib
import pathlib


def available_bytes() -> int | None:
    """Returns how much main memory this process can still get, None where that is unknown."""
    found = []
    with contextlib.suppress(OSError, KeyError, ValueError):
        free = _fields("/proc/meminfo")
        found.append(1024 * (free["MemAvailable:"] + free["SwapFree:"]))
    group = "/sys/fs/cgroup"  # A container's own limit; "max", which is no number, without one.
    with contextlib.suppress(OSError, KeyError, ValueError):
        limit, used = (int(_read(f"{group}/{name}")) for name in ("memory.max", "memory.current"))
        pages = _fields(f"{group}/memory.stat")
        # Of what counts as used, pages of files can be had back.
        found.append(limit - used + pages["inactive_file"] + pages["active_file"])
    return min(found, default=None)


def _fields(path: str) -> dict[str, int]:
    """Reads lines of a name and a number, with or without a unit."""
    return {words[0]: int(words[1]) for words in map(str.split, _read(path).splitlines())}


def _read(path: str) -> str:
    return pathlib.Path(path).read_text(encoding="utf-8")
