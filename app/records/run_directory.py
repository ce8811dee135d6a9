"""Names, creates or opens the directory of a run, locks it, and checks its configuration."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import pathlib
import re
import stat
import time
from collections.abc import Iterator

from app.records.event_file import event_files
from app.records.files import (
    discard,
    fsync,
    io_errors_as,
    make_directory,
    read_json,
    remove,
    write_error,
    write_json,
)
from app.records.history import SUMMARY_FILE
from app.runtime import console
from app.runtime.errors import CheckpointError, LockstepError, OutputError, Terminated, reason_of
from app.runtime.versions import CPU_KERNELS

CONFIG_FILE, LOCK_FILE, LOG_FILE = "config.json", ".lock", "log.txt"
# The files that a command writes beside its log and events, which --overwrite removes. The summary
# is removed first: without it, the run is not finished.
_RECORDS = (
    *(SUMMARY_FILE, "checkpoints", "history.jsonl", "accuracy.png", "accuracy.svg", "mismatch"),
    *("compare.json", "verify.json", "verify.png", "verify.svg", "traces", "benchmark.json"),
    *("benchmark.png", "benchmark.svg"),
    "report.html",
)
# Temporary names of an interrupted write or removal.
_LEFTOVER = re.compile(
    rf"\.({'|'.join(map(re.escape, (CONFIG_FILE, *_RECORDS)))})(\.removed)?\.\d+\.tmp"
)
_LEFTOVER_CHECKPOINT = ".step-*.tmp"
_WRITTEN_BY = {"written_by": "lockstep"}


# Options whose default is the value of the recipe or of the data set, known once both are loaded.
_RESOLVED_LATER = ("learning_rate", "num_train_examples")


def unresolved_settings(old: dict, new: dict) -> set[str]:
    """Returns the settings that may be equal: one configuration has the default, one a value."""
    differing = [name for name in _RESOLVED_LATER if old.get(name) != new.get(name)]
    return {name for name in differing if None in (old.get(name), new.get(name))}


def changed_settings(old: dict, new: dict) -> dict[str, str]:
    """Returns the settings that differ between two configurations, each as "name old → new".

    `CPU_KERNELS` is not compared: a processor with other kernels may resume the run.

    Args:
        old: configuration of the run on disk; may be of a version without some options.
        new: configuration of this command.
    """
    return {
        name: f"{name} {_shown(old.get(name))} → {_shown(new.get(name))}"
        for name in {**old, **new}
        if old.get(name) != new.get(name) and name != CPU_KERNELS
    }


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

    @property
    def is_started(self) -> bool:
        """Whether any run was started in this directory."""
        return (self.path / CONFIG_FILE).exists()

    @property
    def replaces_verification(self) -> bool:
        """Whether this is a verification in the place of another, which is a result, not a run."""
        commands = {self.config.get("command")}
        if self.is_started:
            commands.add(load_run_config(self.path).get("command"))
        return commands == {"verify"}

    def check_same_run(self) -> None:
        """Checks that a run that was started here has this configuration.

        Each training compares the settings that are not resolved yet.

        Raises:
            CheckpointError: it has another one.
        """
        if not self.is_started:
            return
        old = load_run_config(self.path)
        unresolved = unresolved_settings(old, self.config)
        changes = changed_settings(old, self.config)
        refused = [line for name, line in changes.items() if name not in unresolved]
        if refused:
            raise other_settings_error(self.path, refused)

    def start(self, *, overwrite: bool, cpu_kernels: str = "") -> None:
        """Starts or resumes the run, after all checks.

        Args:
            overwrite: remove the files of another run, and nothing else.
            cpu_kernels: the kernels that a training computes with, for `config.json`.
        """
        if overwrite or self.replaces_verification:
            for name in _RECORDS:
                self.remove(name)
                if name == SUMMARY_FILE:
                    self._sync()
            for event_file in event_files(self.path):
                self.remove(event_file.name)
            self._sync()  # Before the new configuration.
        config = self.config | ({CPU_KERNELS: cpu_kernels} if cpu_kernels else {})
        if not self.is_started or load_run_config(self.path) != config:
            write_json(self.path / CONFIG_FILE, config)

    def remove(self, name: str) -> None:
        """Removes a record of an earlier run, if it exists; a directory is removed atomically.

        Raises:
            OutputError: the record cannot be removed.
        """
        path = self.path / name
        if path.is_dir() and not path.is_symlink():
            discard([path])
        else:
            with io_errors_as(path):
                remove(path)

    def _sync(self) -> None:
        """Flushes the names in the directory to disk."""
        with io_errors_as(self.path):
            fsync(self.path)


def other_settings_error(path: pathlib.Path, changes: list[str]) -> CheckpointError:
    """Returns the error for a run directory whose run has other settings."""
    return CheckpointError(
        f"--out={path} contains a run with other settings ({'; '.join(changes)});"
        " choose another directory, or --overwrite to start from scratch"
    )


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
        if config.get("command") == "verify" and not overwrite:
            if not run_directory.replaces_verification:
                raise OutputError(
                    f"--out={path} contains another run than a verification; choose another"
                    " directory, or --overwrite to remove the run"
                )
        elif not overwrite:
            run_directory.check_same_run()
        yield run_directory


def _clear_leftovers(path: pathlib.Path) -> None:
    """Removes temporary files of ended processes; the lock is free, so that none is in use.

    Then flushes the names that these processes have created, because they may have been killed
    before that: this attempt depends on them.
    """
    checkpoints = path / "checkpoints"
    with io_errors_as(path):
        for leftover in path.iterdir():
            if _LEFTOVER.fullmatch(leftover.name):
                remove(leftover)
        if checkpoints.is_dir() and not checkpoints.is_symlink():
            for leftover in checkpoints.glob(_LEFTOVER_CHECKPOINT):
                remove(leftover)
            fsync(checkpoints)
        fsync(path)
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
    names = {entry.name for entry in path.iterdir() if not _LEFTOVER.fullmatch(entry.name)}
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
