"""Finds and names the run directories of a report."""

import contextlib
import dataclasses
import os
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

from app.records.files import read_json
from app.records.run_directory import CONFIG_FILE, load_run_config
from app.runtime import console
from app.runtime.errors import OutputError, reason_of

MEASURED = ("verify", "benchmark", "explain")
# The measurements of a long verification are larger than any other record.
_MAX_BYTES = 1 << 30
_ERRORS = (OSError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)


@dataclasses.dataclass(frozen=True)
class Record:
    """The directory of one run.

    Attributes:
        path: path of the directory.
        label: unique name on the page.
        kind: "train", "compare" or one of `MEASURED`.
        config: contents of `config.json`.
    """

    path: pathlib.Path
    label: str
    kind: str
    config: dict

    def load(self, name: str) -> Any:
        """Reads a JSON file of this run; None if it does not exist.

        Raises:
            OutputError: the file exists, but cannot be read.
        """
        path = self.path / name
        if not path.exists():
            return None
        with reading(path):
            return read_json(path, max_bytes=_MAX_BYTES)


@contextlib.contextmanager
def reading(path: pathlib.Path) -> Iterator[None]:
    """Converts errors of damaged records to `OutputError`.

    Raises:
        OutputError: the record is not in the format that a run writes.
    """
    try:
        yield
    except (*_ERRORS, RecursionError) as error:
        raise OutputError(
            f"{path}: not readable as {path.name} ({reason_of(error)}); write it again with"
            " --overwrite, or leave this directory out"
        ) from error


def find_records(directories: Sequence[pathlib.Path]) -> list[Record]:
    """Returns the runs in directories, each once, in order.

    A comparison includes its own runs. A folder that is not a run includes the runs directly in it,
    by name; other contents are ignored, with a warning for a `config.json` of another program.

    Raises:
        OutputError: a directory does not exist, or is not a run and holds none.
    """
    found: dict[pathlib.Path, tuple[str, dict]] = {}
    for directory in directories:
        for path, kind, config in _stands_for(directory):
            found.setdefault(path.resolve(), (kind, config))
    top = os.path.commonpath([path.parent for path in found])
    return [
        Record(path, _shown(os.path.relpath(path, top)), kind, config)
        for path, (kind, config) in found.items()
    ]


def _stands_for(directory: pathlib.Path) -> list[tuple[pathlib.Path, str, dict]]:
    if not directory.is_dir():
        raise OutputError(
            f"{directory} does not exist; give the directory of a run, see runs/"
            if not directory.exists()
            else f"{directory} is not a directory; give the directory of a run, see runs/"
        )
    if _is_run(directory):
        return list(_run_and_its_own(directory))
    children = _runs_in(directory)
    if not children:
        load_run_config(directory)  # Raises the missing file.
    return [each for child in children for each in _run_and_its_own(child)]


def _run_and_its_own(path: pathlib.Path) -> Iterator[tuple[pathlib.Path, str, dict]]:
    """Yields path, kind and configuration of a run; for a comparison, also those of its runs."""
    config = load_run_config(path)
    strategies = str(config.get("strategy")).split(",")
    if config.get("command") in MEASURED:
        yield path, config["command"], config
    elif len(strategies) > 1 or (path / "compare.json").exists():
        yield path, "compare", config
        # Other folders are from an earlier comparison of other strategies.
        for child in (path / strategy for strategy in strategies):
            if os.path.lexists(child / CONFIG_FILE):
                yield child, "train", load_run_config(child)
    else:
        yield path, "train", config


def _runs_in(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the runs directly in a directory, by name; warns of folders that look like runs."""
    try:
        children = [c for c in sorted(path.iterdir()) if os.path.lexists(c / CONFIG_FILE)]
        runs = [child for child in children if _is_run(child)]
        if runs and (others := [child for child in children if child not in runs]):
            names = ", ".join(_shown(child.name) for child in others)
            console.warn(f"{path}: ignored {names}: {CONFIG_FILE} there is not of a run")
        return runs
    except OSError as error:
        raise OutputError(
            f"{path}: {reason_of(error)}; choose a directory that can be read"
        ) from error


def _is_run(path: pathlib.Path) -> bool:
    """Returns whether a directory is a run; other programs have a `config.json`, too."""
    try:
        load_run_config(path)
    except OutputError:
        return False
    return True


def _shown(name: str) -> str:
    """Returns a file name as text, for any bytes."""
    return name.encode("utf-8", "replace").decode()
