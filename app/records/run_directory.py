"""Names, creates, locks and opens the directory of a run, and decides which run it holds."""

import contextlib
import errno
import fcntl
import itertools
import json
import os
import pathlib
import stat
import time
from collections.abc import Iterator, Mapping
from typing import Any

from app import console
from app.errors import CheckpointError, LockstepError, OutputError, Terminated, reason_of
from app.records import files
from app.records.history import FIGURE_FILES, HISTORY_FILE, SUMMARY_FILE, event_files

CONFIG_FILE, LOCK_FILE, LOG_FILE, CHECKPOINTS = "config.json", ".lock", "log.txt", "checkpoints"
# What --overwrite removes. The summary goes first, so that no result is without its checkpoint.
_RECORDS = (
    *(SUMMARY_FILE, CHECKPOINTS, HISTORY_FILE, *FIGURE_FILES, "report.html"),
    *("compare.json", "verify.json", "benchmark.json"),
)
HEADER = {"written_by": "lockstep", "format": 3}  # Of every `config.json`; 2.x has no format.
# Options that say the same in several ways: of a training, what they resolve to is compared.
_RESOLVED = (
    *("learning_rate", "dataset", "num_train_examples", "num_gpus", "device", "num_workers"),
    "all_reduce",
)


def version_2_error(path: pathlib.Path) -> CheckpointError:
    """Returns the error for a record in a format that this version does not read."""
    return CheckpointError(
        f"{path}: written by version 2 of this program; finish it there, or choose another --out"
    )


def literal_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings that two attempts of one training have in common, word for word."""
    return {name: value for name, value in config.items() if name not in _RESOLVED}


def check_same_run(path: pathlib.Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises CheckpointError if settings differ from the run in `path` by else than more epochs."""
    changed = []
    for name in {**old, **new}:
        before, after = old.get(name), new.get(name)
        if before == after or (name == "epochs" and (before or 0) < (after or 0)):
            continue
        changed.append(f"{name} {_shown(before)} → {_shown(after)}")
    if changed:
        raise CheckpointError(
            f"--out={path} contains a run with other settings ({'; '.join(changed)});"
            " choose another directory, or --overwrite to start from scratch"
        )


def _shown(value: object) -> str:
    if value is None:
        return "default"
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return f"{text[:12]}…" if len(text) == 64 else text


class RunDirectory:
    """A run directory that is locked by this process; `config` is that of `config.json`."""

    def __init__(self, path: pathlib.Path, config: Mapping[str, Any]) -> None:
        self.path = path
        self.config = {**HEADER, **json.loads(json.dumps(config))}

    def old_config(self) -> dict:
        """Returns the configuration of the run that was started here; {} without one."""
        return load_run_config(self.path) if (self.path / CONFIG_FILE).exists() else {}

    def restore_config(self) -> None:
        """Writes `config.json` again if it is lost, damaged or edited: checkpoints have it, too."""
        try:
            is_own = load_run_config(self.path) == self.config
        except LockstepError:
            is_own = False
        if not is_own:
            files.write_json(self.path / CONFIG_FILE, self.config)
            console.warn(f"{self.path / CONFIG_FILE} was not as this run began; written again")

    def start(self, *, overwrite: bool) -> None:
        """Starts or resumes the run; `overwrite` first removes the files of another run."""
        if overwrite:
            for path in (*(self.path / name for name in _RECORDS), *event_files(self.path)):
                files.remove(path)
            with files.io_errors_as(self.path):
                files.fsync(self.path)  # Before the new configuration.
        files.write_json(self.path / CONFIG_FILE, self.config)


@contextlib.contextmanager
def open_run_directory(path: pathlib.Path, config: Mapping[str, Any]) -> Iterator[RunDirectory]:
    """Creates `path` with its parents, or checks that it is a run directory, and locks it.

    Raises OutputError if that is impossible. A directory that this call creates, or that was empty,
    is removed if the block raises before a run has started.
    """
    descriptor, was_empty = _open_lock_file(path)
    with open(descriptor, "r+", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = lock.read().strip() or "unknown"
            raise OutputError(
                f"--out={path} is in use by process {holder}; wait, or choose another directory"
            ) from error
        with contextlib.suppress(OSError):  # The disk is full; the lock is held nevertheless.
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        _clear_leftovers(path)
        try:
            yield RunDirectory(path, config)
        except (LockstepError, KeyboardInterrupt, Terminated):
            if was_empty and not (path / CONFIG_FILE).exists():
                with contextlib.suppress(OSError):
                    (path / LOCK_FILE).unlink(missing_ok=True)
                    (path / LOG_FILE).unlink(missing_ok=True)
                    path.rmdir()  # Fails if it has other files.
            raise


def _open_lock_file(path: pathlib.Path) -> tuple[int, bool]:
    """Creates the directory and a lock file; returns its descriptor, and whether it was empty."""
    with files.io_errors_as(path):
        files.make_directory(path)
        names = {name for name in os.listdir(path) if not name.startswith(files.TEMPORARY)}
        has_checkpoints = any(path.glob(f"{CHECKPOINTS}/step-*-epoch-*.safetensors"))
        if not names <= {LOCK_FILE, LOG_FILE} and not has_checkpoints and not is_run(path):
            raise OutputError(
                f"--out={path} contains files that this program did not write; choose a new"
                " directory"
            )
        descriptor = os.open(path / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, f"{LOCK_FILE} is not a regular file")
        return descriptor, not names


def _clear_leftovers(path: pathlib.Path) -> None:
    """Removes temporary files of ended processes, and flushes the names that they have created."""
    checkpoints = path / CHECKPOINTS
    if checkpoints.is_symlink():
        raise OutputError(
            f"{checkpoints} is a symbolic link, and nothing is written outside of --out; move the"
            " directory that it points to here"
        )
    with files.io_errors_as(path):
        # The lock is free: none is in use. Killed processes may not have flushed their names.
        for folder in filter(pathlib.Path.is_dir, (checkpoints, path)):
            for leftover in folder.glob(f"{files.TEMPORARY}*"):
                files.remove(leftover)
            files.fsync(folder)
    with contextlib.suppress(OSError):  # It may not be readable.
        files.fsync(path.parent)


def open_log(path: pathlib.Path) -> None:
    """Opens the log file of the run in `path`; raises OutputError if it cannot be written."""
    with files.io_errors_as(path / LOG_FILE):
        console.open_log(path / LOG_FILE)


@contextlib.contextmanager
def open_command_directory(
    path: pathlib.Path, config: Mapping[str, Any], *, overwrite: bool
) -> Iterator[RunDirectory]:
    """Opens the run directory of a command, and its log.

    Without `overwrite`, raises CheckpointError if it has a run of another configuration, and
    OutputError if a verification would replace a run.
    """
    with open_run_directory(path, config) as run_directory:
        open_log(path)
        old, new = {} if overwrite else run_directory.old_config(), run_directory.config
        if old and new.get("command") == "verify":
            if old.get("command") != "verify":
                raise OutputError(
                    f"--out={path} contains another run than a verification; choose another"
                    " directory, or --overwrite to remove the run"
                )
        elif old and new.get("command") == "compare":  # Each training checks its own.
            check_same_run(path, literal_options(old), literal_options(new))
        elif old:
            check_same_run(path, old, new)
        yield run_directory


def load_run_config(path: pathlib.Path) -> dict:
    """Reads the configuration of a run; raises CheckpointError for a run of another version."""
    try:
        config = files.read_json(path / CONFIG_FILE)
        if not isinstance(config, dict) or config.get("written_by") != HEADER["written_by"]:
            raise ValueError("of another program")
    except (OSError, ValueError, RecursionError) as error:
        raise OutputError(
            f"{path}: not the directory of a run ({CONFIG_FILE}: {reason_of(error)}); see runs/"
        ) from error
    if config.get("format") != HEADER["format"]:
        raise version_2_error(path)
    return config


def is_run(path: pathlib.Path) -> bool:
    """Returns whether a directory is a run; other programs have a `config.json`, too."""
    try:
        load_run_config(path)
    except LockstepError as error:
        return isinstance(error, CheckpointError)
    return True


def default_out(kind: str, model: str) -> str:
    """Returns a new name under `runs/`, of the strategy or command and the model."""
    first = f"runs/{time.strftime('%Y%m%d-%H%M%S')}-{kind}-{model}"
    # Another run may have started in the same second.
    names = itertools.chain([first], (f"{first}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not pathlib.Path(name).exists())


def named_path(name: str) -> pathlib.Path:
    """Returns the path for the value of a flag; `~` is the home directory, which may be unknown."""
    try:
        return pathlib.Path(name).expanduser()
    except RuntimeError as error:
        raise OutputError(
            f"{name}: {reason_of(error)}; write the path of the directory in full"
        ) from error
