"""Names, creates or opens the directory of a run, locks it, and decides which run it holds."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import pathlib
import stat
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from app.records.event_file import event_files
from app.records.files import (
    TEMPORARY,
    fsync,
    io_errors_as,
    make_directory,
    read_json,
    remove,
    write_error,
    write_json,
)
from app.records.history import FIGURE_FILES, HISTORY_FILE, SUMMARY_FILE
from app.runtime import console
from app.runtime.errors import CheckpointError, LockstepError, OutputError, Terminated, reason_of

CONFIG_FILE, LOCK_FILE, LOG_FILE = "config.json", ".lock", "log.txt"
# The files that a command writes beside its log and events, which --overwrite removes. The summary
# is removed first, so that no result is shown without its checkpoint.
_RECORDS = (
    *(SUMMARY_FILE, "checkpoints", HISTORY_FILE, *FIGURE_FILES, "mismatch"),
    *("compare.json", "verify.json", "verify.png", "verify.svg", "traces", "benchmark.json"),
    *("benchmark.png", "benchmark.svg"),
    "report.html",
)
_WRITTEN_BY = {"written_by": "lockstep"}
_RESOLVED_LATER = ("learning_rate", "num_train_examples")  # As `RunMetadata.resolved` has them.


def check_same_run(
    path: pathlib.Path,
    old: Mapping[str, Any],
    new: Mapping[str, Any],
    *,
    accepted: Collection[str] = (),
    resolved: tuple[Mapping[str, Any], Mapping[str, Any]] | None = None,
) -> dict[str, str]:
    """Decides whether a command resumes the run in a directory; returns what has changed.

    Args:
        path: the run directory, for the message.
        old: settings of the run on disk; may be of a version without some options.
        new: settings of the command.
        accepted: settings that may change; "epochs" only to more.
        resolved: of both, the values of options whose default depends on the recipe or the data;
            None if they are not known yet, so that a default and a value are not compared.

    Returns:
        Setting → "name old → new" for the accepted changes.

    Raises:
        CheckpointError: another setting has changed.
    """
    changes, refused = dict[str, str](), list[str]()
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)  # None is a default.
        if before != after and None in (before, after) and name in _RESOLVED_LATER:
            before, after = (each[name] for each in resolved) if resolved else (None, None)
        if before == after:
            continue
        changes[name] = f"{name} {_shown(before)} → {_shown(after)}"
        if name not in accepted or (name == "epochs" and not 0 < (before or 0) < (after or 0)):
            refused.append(changes[name])
    if refused:
        raise CheckpointError(
            f"--out={path} contains a run with other settings ({'; '.join(refused)});"
            " choose another directory, or --overwrite to start from scratch"
        )
    return changes


def _shown(value: object) -> str:
    if value is None:
        return "default"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text[:12]}…" if len(text) == 64 else text


class RunDirectory:
    """A run directory that is locked by this process.

    Args:
        path: path of the directory.
        config: the fields that the result depends on.

    Attributes:
        config: these fields as in `config.json`.
    """

    def __init__(self, path: pathlib.Path, config: dict):
        self.path = path
        self.config = {**_WRITTEN_BY, **json.loads(json.dumps(config))}

    def old_config(self) -> dict:
        """Returns the configuration of the run that was started here; {} without one."""
        return load_run_config(self.path) if (self.path / CONFIG_FILE).exists() else {}

    def start(self, *, overwrite: bool) -> None:
        """Starts or resumes the run, after all checks.

        Args:
            overwrite: remove the files of another run, and nothing else.
        """
        if overwrite:
            for name in (*_RECORDS, *(each.name for each in event_files(self.path))):
                self.remove(name)
                if name == SUMMARY_FILE:
                    self._sync()
            self._sync()  # Before the new configuration.
        write_json(self.path / CONFIG_FILE, self.config)

    def remove(self, name: str) -> None:
        """Removes a record of an earlier run, if it exists; raises as `files.remove` does."""
        remove(self.path / name)

    def _sync(self) -> None:
        """Flushes the names in the directory to disk."""
        with io_errors_as(self.path):
            fsync(self.path)


@contextlib.contextmanager
def open_run_directory(path: pathlib.Path, config: dict) -> Iterator[RunDirectory]:
    """Creates `path` with its parents, or checks that it is a run directory, and locks it.

    The kernel releases the lock when the process ends.

    Raises:
        OutputError: it cannot be created or written, holds other files, or is in use.
    """
    was_empty = _is_empty(path)
    with open(_open_lock_file(path), "r+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            holder = lock.read().strip() or "unknown"
            raise OutputError(
                f"--out={path} is in use by process {holder}; wait, or choose another directory"
            ) from error
        with contextlib.suppress(OSError):  # The disk is full; the lock is held nevertheless.
            os.ftruncate(lock.fileno(), 0)
            os.pwrite(lock.fileno(), str(os.getpid()).encode(), 0)
        _clear_leftovers(path)
        try:
            yield RunDirectory(path, config)
        except (LockstepError, KeyboardInterrupt, Terminated):
            if was_empty and not (path / CONFIG_FILE).exists():
                _remove_empty_run(path)
            raise


def _is_empty(path: pathlib.Path) -> bool:
    """Returns whether the directory holds nothing, or does not exist."""
    try:
        return not os.listdir(path)
    except OSError as error:
        return error.errno == errno.ENOENT


def _remove_empty_run(path: pathlib.Path) -> None:
    """Removes a directory that holds only a lock file and a log."""
    with contextlib.suppress(OSError):  # It has other files, or has become read-only.
        (path / LOCK_FILE).unlink(missing_ok=True)
        (path / LOG_FILE).unlink(missing_ok=True)
        path.rmdir()


def open_log(path: pathlib.Path) -> None:
    """Opens the log file of the run in `path`.

    Raises:
        OutputError: the log cannot be written.
    """
    try:
        console.open_log(path / LOG_FILE)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise write_error(path / LOG_FILE, error) from error
        raise OutputError(
            f"{path / LOG_FILE}: {error.strerror}; choose another directory with --out"
        ) from error


@contextlib.contextmanager
def open_command_directory(
    path: pathlib.Path, config: dict, *, overwrite: bool
) -> Iterator[RunDirectory]:
    """Opens the run directory of a command, and its log.

    Raises:
        CheckpointError: it has a run of another configuration, unless `overwrite` is set.
        OutputError: a verification would replace a run; or see `open_run_directory`, `open_log`.
    """
    with open_run_directory(path, config) as run_directory:
        open_log(path)
        old = {} if overwrite else run_directory.old_config()
        if old and config.get("command") != "verify":
            check_same_run(path, old, run_directory.config)
        elif old and old.get("command") != "verify":
            raise OutputError(
                f"--out={path} contains another run than a verification; choose another"
                " directory, or --overwrite to remove the run"
            )
        yield run_directory


def _clear_leftovers(path: pathlib.Path) -> None:
    """Removes temporary files of ended processes; the lock is free, so that none is in use.

    Then flushes the names that these processes have created, because they may have been killed
    before that: this attempt depends on them.
    """
    checkpoints = path / "checkpoints"
    has_checkpoints = checkpoints.is_dir() and not checkpoints.is_symlink()
    with io_errors_as(path):
        for folder in (checkpoints, path) if has_checkpoints else (path,):
            for leftover in folder.glob(f"{TEMPORARY}*"):
                remove(leftover)
            fsync(folder)
    with contextlib.suppress(OSError):  # It may not be readable.
        fsync(path.parent)


def load_run_config(path: pathlib.Path) -> dict:
    """Reads the configuration of a run.

    Raises:
        OutputError: this is not a run directory.
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


def _open_lock_file(path: pathlib.Path) -> int:
    """Creates the directory and its lock file if necessary; returns a descriptor of the file."""
    try:
        make_directory(path)
        check_not_foreign(path)
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, f"{LOCK_FILE} is not a regular file")
        return descriptor
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise write_error(path / LOCK_FILE, error) from error
        raise OutputError(
            f"--out={path}: {reason_of(error)}; choose a directory that can be created and"
            " written to"
        ) from error


def check_not_foreign(path: pathlib.Path) -> None:
    """Checks that a directory is empty or a run directory.

    Raises:
        OutputError: it holds other files.
        OSError: it cannot be read.
    """
    names = {entry.name for entry in path.iterdir() if not entry.name.startswith(TEMPORARY)}
    if names <= {LOCK_FILE, LOG_FILE}:
        return
    try:
        load_run_config(path)
    except OutputError as error:
        raise OutputError(
            f"--out={path} contains files that this program did not write; choose a new directory"
        ) from error


def default_out(kind: str, *models: str) -> str:
    """Returns a new name under `runs/`.

    Args:
        kind: strategy of a training, or name of the command.
        *models: names of the models.
    """
    name = "-".join([f"runs/{time.strftime('%Y%m%d-%H%M%S')}", kind, *models])
    # The name exists if another run started in the same second, or the clock was set back.
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not pathlib.Path(name).exists())


def named_path(name: str) -> pathlib.Path:
    """Returns the path for the value of a flag; expands `~`.

    Raises:
        OutputError: the home directory is unknown.
    """
    try:
        return pathlib.Path(name).expanduser()
    except RuntimeError as error:
        raise OutputError(
            f"{name}: {reason_of(error)}; write the path of the directory in full"
        ) from error
