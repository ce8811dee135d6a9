"""The directory of one run: made or found, locked, and held against the configuration."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import shutil
from collections.abc import Iterator

from app.errors import CheckpointError, LockstepError, OutputError, Terminated
from app.records.files import write_json

CONFIG_FILE, LOCK_FILE, LOG_FILE = "config.json", ".lock", "log.txt"
# All that a command writes beside its log, and so all that --overwrite throws away.
_RECORDS = (
    *("checkpoints", "history.jsonl", "summary.json", "accuracy.png", "accuracy.svg"),
    *("compare.json", "verify.json", "verify.png", "verify.svg", "traces", "benchmark.json"),
    *("throughput.png", "throughput.svg", "speedup.png", "speedup.svg", "explain.json"),
    CONFIG_FILE,
)
# What a write that was cut off leaves.
_LEFTOVER = re.compile(
    r"\.(?:(?:config|summary|compare|verify|benchmark|explain|history|accuracy|throughput|speedup)"
    r"\.(?:jsonl?|png|svg)|traces)"
    r"\.\d+\.tmp"
)
_WRITTEN_BY = {"written_by": "lockstep"}


class RunDirectory:
    """A directory that this process holds for one run.

    Args:
        path: where it is.
        config: what the result depends on, as it stands in `config.json`.
    """

    def __init__(self, path: pathlib.Path, config: dict):
        self.path = path
        self._config = {**_WRITTEN_BY, **json.loads(json.dumps(config))}

    def holds_this_run(self) -> bool:
        """Tells whether a run of this configuration was started here.

        Raises:
            CheckpointError: it is a run of another configuration.
        """
        if not (self.path / CONFIG_FILE).exists():
            return False
        old, new = load_run_config(self.path), self._config
        changes = [
            f"{name} {old.get(name)} → {new.get(name)}"
            for name in {**old, **new}
            if old.get(name) != new.get(name)
        ]
        if changes:
            raise CheckpointError(
                f"--out={self.path} holds a run of another configuration ({'; '.join(changes)})"
                " — the same one is required to go on with it; choose another directory,"
                " or --overwrite to start anew"
            )
        return True

    def start(self, *, overwrite: bool) -> None:
        """Begins the run, or goes on with it, once all that can be refused has been checked.

        Args:
            overwrite: throw away what another run has written here, and nothing else.
        """
        if overwrite:
            for name in _RECORDS:  # The configuration goes last: until then it is a run of ours.
                _remove(self.path / name)
        if not (self.path / CONFIG_FILE).exists():
            write_json(self.path / CONFIG_FILE, self._config)

    def remove(self, name: str) -> None:
        """Removes a record of an earlier run, if it is there."""
        _remove(self.path / name)


@contextlib.contextmanager
def open_run_directory(path: pathlib.Path, config: dict) -> Iterator[RunDirectory]:
    """Makes `path` with its parents, or finds it to be ours, and holds its lock.

    The lock is the kernel's: it ends with the process, however that ends.

    Raises:
        OutputError: it cannot be made or written, holds something else, or is in use.
    """
    was_empty = not path.is_dir() or not any(path.iterdir())
    with _locked(path):
        for leftover in [*path.iterdir(), *path.glob("checkpoints/.step-*.tmp")]:
            if leftover.parent != path or _LEFTOVER.fullmatch(leftover.name):
                _remove(leftover)  # Of a process that is no more: the lock was free.
        try:
            yield RunDirectory(path, config)
        except (LockstepError, KeyboardInterrupt, Terminated):
            if was_empty:
                _remove_unless_started(path)
            raise


def _remove_unless_started(path: pathlib.Path) -> None:
    """Leaves no directory behind in which nothing but a lock and a log ever was."""
    if not (path / CONFIG_FILE).exists():
        (path / LOCK_FILE).unlink(missing_ok=True)
        (path / LOG_FILE).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # Something else is in it.
            path.rmdir()


def load_run_config(path: pathlib.Path) -> dict:
    """Reads the configuration that a run was started with.

    Raises:
        OutputError: this is not the directory of a run.
    """
    try:
        config = json.loads((path / CONFIG_FILE).read_text(encoding="utf-8"))
        if not isinstance(config, dict) or not config.items() >= _WRITTEN_BY.items():
            raise ValueError("of another program")
        return config
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{path}: not the directory of a run ({CONFIG_FILE}: {_reason(error)})"
            " — one that train made is required; see runs/"
        ) from error


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Makes the directory if need be and holds its lock file."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if _is_foreign(path):
            raise OutputError(
                f"--out={path} holds files that no run of this program made — a new directory,"
                " or that of a run, is required; choose another name"
            )
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except OSError as error:
        raise OutputError(
            f"--out={path}: {_reason(error)} — a directory that can be made and written to is"
            " required; choose another place"
        ) from error
    with open(descriptor, "r+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            lock.seek(0)
            raise OutputError(
                f"--out={path} is in use by process {lock.read().strip() or 'unknown'}"
                " — a directory of its own is required for each run; wait, or choose another"
            ) from error
        with contextlib.suppress(OSError):  # A full disk: the lock holds all the same.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield


def _is_foreign(path: pathlib.Path) -> bool:
    """Tells whether `path` holds anything, but not the configuration of a run of ours."""
    names = {entry.name for entry in path.iterdir() if not _LEFTOVER.fullmatch(entry.name)}
    if names <= {LOCK_FILE, LOG_FILE}:
        return False
    try:
        load_run_config(path)
    except OutputError:
        return True
    return False


def _remove(path: pathlib.Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
