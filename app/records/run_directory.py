"""The directory of one run: made or found, locked, and held against the configuration."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import re
import stat
from collections.abc import Iterator

from app.config.split_options import recorded_value
from app.records.event_file import EVENTS_FILE
from app.records.files import (
    io_errors_as,
    make_directory,
    read_json,
    recover_replaced,
    remove,
    temporary_path,
    write_error,
    write_json,
)
from app.runtime import console
from app.runtime.errors import CheckpointError, LockstepError, OutputError, Terminated, reason_of

CONFIG_FILE, LOCK_FILE, LOG_FILE = "config.json", ".lock", "log.txt"
RUN_LOG_FILE = "log.jsonl"
# All that a command writes beside its log, and so all that --overwrite throws away. The summary
# goes first: without it nothing is finished.
_RECORDS = (
    *("summary.json", "checkpoints", "history.jsonl", "accuracy.png", "accuracy.svg"),
    *(RUN_LOG_FILE, EVENTS_FILE),
    *("compare.json", "verify.json", "verify.png", "verify.svg", "traces", "benchmark.json"),
    *("throughput.png", "throughput.svg", "speedup.png", "speedup.svg", "explain.json"),
    "report.html",
)
# What a write that was cut off leaves.
_LEFTOVER = re.compile(
    r"\.(?:(?:config|summary|compare|verify|benchmark|explain|history|accuracy|throughput|speedup)"
    rf"\.(?:jsonl?|png|svg)|report\.html|traces|checkpoints|{re.escape(EVENTS_FILE)})"
    r"(?:\.removed)?\.\d+\.tmp"
)
_WRITTEN_BY = {"written_by": "lockstep"}


class RunDirectory:
    """A directory that this process holds for one run.

    Args:
        path: where it is.
        config: what the result depends on.

    Attributes:
        config: the same, as it stands in `config.json`.
    """

    def __init__(self, path: pathlib.Path, config: dict):
        self.path = path
        self.config = {**_WRITTEN_BY, **json.loads(json.dumps(config))}

    @property
    def is_started(self) -> bool:
        """Whether a run was started here, of whatever configuration."""
        return (self.path / CONFIG_FILE).exists()

    def load_config(self) -> dict:
        """Reads the configuration of the run that was started here."""
        return load_run_config(self.path)

    def check_same_run(self) -> None:
        """Checks that what was started here, if anything, had this configuration.

        Raises:
            CheckpointError: it had another one.
        """
        old, new = self.load_config() if self.is_started else self.config, self.config
        changes = [
            f"{name} {recorded_value(old, name)} → {new.get(name)}"
            for name in {**old, **new}
            if (recorded_value(old, name) if name in new else old[name]) != new.get(name)
        ]
        if changes:
            raise CheckpointError(
                f"--out={self.path} contains a run with other settings ({'; '.join(changes)});"
                " choose another directory, or --overwrite to start from scratch"
            )

    def start(self, *, overwrite: bool) -> None:
        """Begins the run, or goes on with it, once all that can be refused has been checked.

        Args:
            overwrite: throw away what another run has written here, and nothing else.
        """
        if overwrite:
            for name in _RECORDS:
                self.remove(name)
        if not self.is_started or self.load_config() != self.config:
            write_json(self.path / CONFIG_FILE, self.config)

    def remove(self, name: str) -> None:
        """Removes a record of an earlier run, if it is there; at once, if it is a directory.

        Raises:
            OutputError: it cannot be removed.
        """
        path = self.path / name
        with io_errors_as(path):
            if path.is_dir() and not path.is_symlink():
                # Another name than the one in which its successor may be waiting.
                path = path.rename(temporary_path(path.with_name(f"{name}.removed")))
            remove(path)


@contextlib.contextmanager
def open_run_directory(path: pathlib.Path, config: dict) -> Iterator[RunDirectory]:
    """Makes `path` with its parents, or finds it to be ours, and holds its lock.

    The lock is the kernel's: it ends with the process, however that ends.

    Raises:
        OutputError: it cannot be made or written, holds something else, or is in use.
    """
    was_empty = _is_empty(path)
    with _locked(path):
        _clear_leftovers(path)
        try:
            yield RunDirectory(path, config)
        except (LockstepError, KeyboardInterrupt, Terminated):
            if was_empty:
                _remove_unless_started(path)
            raise


def open_log(path: pathlib.Path) -> None:
    """Opens the log file of the run in `path`.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        console.open_log(path / LOG_FILE)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise write_error(path / LOG_FILE, error) from error
        raise OutputError(
            f"{path / LOG_FILE}: {error.strerror}; choose another directory with --out"
        ) from error


def _is_empty(path: pathlib.Path) -> bool:
    """Tells whether nothing is there that was there before us."""
    try:
        return not os.listdir(path)
    except OSError as error:
        return error.errno == errno.ENOENT


def _clear_leftovers(path: pathlib.Path) -> None:
    """Removes what a process that is no more was writing: the lock was free."""
    checkpoints = path / "checkpoints"
    with io_errors_as(path):
        for leftover in path.iterdir():
            if _LEFTOVER.fullmatch(leftover.name):
                remove(leftover)
        if checkpoints.is_dir() and not checkpoints.is_symlink():
            recover_replaced(checkpoints)
            for leftover in checkpoints.glob(".step-*.tmp"):
                remove(leftover)


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
        config = read_json(path / CONFIG_FILE)
        if not isinstance(config, dict) or not config.items() >= _WRITTEN_BY.items():
            raise ValueError("of another program")
        return config
    except (OSError, ValueError) as error:
        raise OutputError(
            f"{path}: not the directory of a run ({CONFIG_FILE}: {reason_of(error)}); see runs/"
        ) from error


@contextlib.contextmanager
def _locked(path: pathlib.Path) -> Iterator[None]:
    """Makes the directory if need be and holds its lock file."""
    try:
        make_directory(path)
        check_not_foreign(path)
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, f"{LOCK_FILE} is not a regular file")
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise write_error(path / LOCK_FILE, error) from error
        raise OutputError(
            f"--out={path}: {reason_of(error)}; choose a directory that can be created and"
            " written to"
        ) from error
    with open(descriptor, "r+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            lock.seek(0)
            raise OutputError(
                f"--out={path} is in use by process {lock.read().strip() or 'unknown'}; wait, or"
                " choose another directory"
            ) from error
        with contextlib.suppress(OSError):  # A full disk: the lock holds all the same.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield


def check_not_foreign(path: pathlib.Path) -> None:
    """Checks that a directory is empty, or that of a run of ours.

    Raises:
        OutputError: it holds anything else.
        OSError: it cannot be read.
    """
    if _is_foreign(path):
        raise OutputError(
            f"--out={path} contains files that this program did not write; choose a new directory"
        )


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
