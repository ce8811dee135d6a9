"""Creates places for a training that can fail: small, read-only, or with little memory.

Needs root: mounts are made in a mount namespace of this process, which ends with it.
"""

import contextlib
import ctypes
import os
import pathlib
import subprocess
from collections.abc import Iterator

_CLONE_NEWNS = 0x20000
_GROUPS = pathlib.Path("/sys/fs/cgroup/memory")  # Version 1.
_LARGE = "size=1g,nr_inodes=100k"


def enter_mount_namespace() -> bool:
    """Moves this process into a mount namespace with a /dev/shm of its own, if it may."""
    if os.geteuid() or ctypes.CDLL(None).unshare(_CLONE_NEWNS):
        return False
    try:
        _mount("--make-rprivate", "/")
        _mount("-t", "tmpfs", "soak", "/dev/shm")
    except OSError:
        return False
    return True


class SmallDisk:
    """A file system in memory, whose size, number of files and mode can be changed.

    Args:
        path: an empty directory.
    """

    def __init__(self, path: pathlib.Path):
        self._path = path
        _mount("-t", "tmpfs", "-o", _LARGE, "soak", str(path))

    @contextlib.contextmanager
    def limited(self, *, free_bytes: int | None = None, free_files: int | None = None):
        """Limits the free space, or how many more files can be created, within the context."""
        status = os.statvfs(self._path)
        used_bytes = (status.f_blocks - status.f_bfree) * status.f_frsize
        limit = (
            f"nr_inodes={status.f_files - status.f_ffree + free_files}"
            if free_bytes is None
            else f"size={(used_bytes + free_bytes) // status.f_frsize * status.f_frsize}"
        )
        _mount("-o", f"remount,{limit}", str(self._path))
        try:
            yield
        finally:
            _mount("-o", f"remount,{_LARGE}", str(self._path))

    @contextlib.contextmanager
    def read_only(self) -> Iterator[None]:
        """Makes every path read-only within the context; open files remain writable."""
        # A remount of the file system itself would fail while a file is open for writing.
        _mount("--bind", str(self._path), str(self._path))
        try:
            _mount("-o", "remount,bind,ro", str(self._path))
            yield
        finally:
            _command("umount", "--lazy", str(self._path))

    def close(self) -> None:
        """Removes the file system and its files."""
        _command("umount", "--lazy", str(self._path))


class MemoryGroup:
    """A control group with a memory limit; a context manager, which removes the group.

    Args:
        name: name of the group.
        limit_bytes: memory that its processes may use.

    Raises:
        OSError: this process may not create one.
    """

    def __init__(self, name: str, limit_bytes: int):
        self._path = _GROUPS / name
        self._path.mkdir()
        (self._path / "memory.limit_in_bytes").write_text(str(limit_bytes))

    def __enter__(self) -> "MemoryGroup":
        return self

    def __exit__(self, *exception: object) -> None:
        self._path.rmdir()

    def join(self) -> None:
        """Moves this process into the group."""
        (self._path / "cgroup.procs").write_text(str(os.getpid()))


def _mount(*arguments: str) -> None:
    _command("mount", *arguments)


def _command(*words: str) -> None:
    """Runs a program of the system.

    Raises:
        OSError: it is missing or fails.
    """
    try:
        subprocess.run(words, check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"{' '.join(words)}: {error.stderr.strip()}") from error
