"""The directory of one run: made or found, locked, and held against the configuration."""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import shutil
from collections.abc import Iterator

from app.errors import CheckpointError, OutputError
from app.records.files import write_json

CONFIG_FILE, LOCK_FILE, LOG_FILE = "config.json", ".lock", "log.txt"
# All that a command writes beside its configuration, and so all that --overwrite throws away.
_RECORDS = (
    *("history.jsonl", "summary.json", "accuracy.png", "accuracy.svg", "compare.json"),
    *("checkpoints", LOG_FILE, CONFIG_FILE),
)
_WRITTEN_BY = {"written_by": "lockstep"}


@contextlib.contextmanager
def open_run_directory(
    path: pathlib.Path, config: dict, *, overwrite: bool = False
) -> Iterator[pathlib.Path]:
    """Makes `path` the directory of a run of `config`, or finds it to be one, and holds its lock.

    The lock is the kernel's: it ends with the process, however that ends.

    Args:
        path: made with its parents where it does not exist.
        config: what the result depends on, as it stands in `config.json`.
        overwrite: throw another run away instead of refusing.

    Raises:
        OutputError: it cannot be made or written, holds something else, or is in use.
        CheckpointError: it holds a run of another configuration.
    """
    with _locked(path):
        if overwrite:
            _clear(path)
        config = {**_WRITTEN_BY, **json.loads(json.dumps(config))}
        if (path / CONFIG_FILE).exists():
            _check_same(path, load_run_config(path), config)
        else:
            write_json(path / CONFIG_FILE, config)
        yield path


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
        lock = (path / LOCK_FILE).open("a+", encoding="utf-8")
    except OSError as error:
        raise OutputError(
            f"--out={path}: {_reason(error)} — a directory that can be made and written to is"
            " required; choose another place"
        ) from error
    with lock:
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
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        yield


def _is_foreign(path: pathlib.Path) -> bool:
    """Tells whether `path` holds anything, but not the configuration of a run of ours."""
    if {entry.name for entry in path.iterdir()} <= {LOCK_FILE, LOG_FILE}:
        return False
    try:
        load_run_config(path)
    except OutputError:
        return True
    return False


def _clear(path: pathlib.Path) -> None:
    """Removes what a run wrote and nothing else; the configuration goes last."""
    for name in _RECORDS:
        entry = path / name
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink(missing_ok=True)


def _check_same(path: pathlib.Path, old: dict, new: dict) -> None:
    changes = [
        f"{name} {old.get(name)} → {new.get(name)}"
        for name in {**old, **new}
        if old.get(name) != new.get(name)
    ]
    if changes:
        raise CheckpointError(
            f"--out={path} holds a run of another configuration ({'; '.join(changes)})"
            " — the same one is required to go on with it; choose another directory,"
            " or --overwrite to start anew"
        )


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
