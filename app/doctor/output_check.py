"""Checks whether the output directory is writable and has enough space. Leaves no files."""

import os
import pathlib
import tempfile

from app.config import DoctorConfig
from app.doctor.check import WARNING, Check
from app.records.run_directory import check_not_foreign
from app.records.run_naming import named_path
from app.runtime.errors import DiskFullError, LockstepError, OutputError, reason_of

_DEFAULT = "runs"
# Bytes of a checkpoint per parameter: weights and momentum in float32. While the next checkpoint is
# written there are three.
_NEEDED_BYTES = {"lenet": 3 << 20, "resnet18": 270 << 20}


def check_output(config: DoctorConfig) -> Check:
    """Checks that a run's directory can be created."""
    name = config.out or _DEFAULT
    try:
        path = named_path(name)
        there = _nearest(path)
        if config.out and path.is_dir():
            check_not_foreign(path)
        _try(there)
        free = os.statvfs(there)
    except LockstepError as error:
        return Check.of_error("output", error)
    except OSError as error:
        return Check.of_error("output", _unusable(name, error))
    return _check_room(path, free.f_bavail * free.f_frsize)


def _nearest(path: pathlib.Path) -> pathlib.Path:
    """Returns the nearest existing parent directory."""
    absolute = path.absolute()
    return next(place for place in (absolute, *absolute.parents) if os.path.lexists(place))


def _try(there: pathlib.Path) -> None:
    """Writes a byte there: permissions do not show that a file system is read-only."""
    # If the kernel supports it, this file never has a name.
    with tempfile.TemporaryFile(dir=there) as file:
        file.write(b"1")


def _unusable(name: str, error: OSError) -> OutputError:
    return OutputError(f"--out={name}: {reason_of(error)}; choose another directory with --out")


def _check_room(path: pathlib.Path, free_bytes: int) -> Check:
    lenet, resnet = _NEEDED_BYTES["lenet"], _NEEDED_BYTES["resnet18"]
    shown = f"{path}: can be written, {free_bytes / 1e9:,.1f} GB free"
    if free_bytes < lenet:
        error = DiskFullError(
            f"{path}: {free_bytes:,} bytes are free, but checkpoints of LeNet take {lenet:,};"
            " make room, or choose another directory with --out"
        )
        return Check.of_error("output", error)
    if free_bytes < resnet:
        advice = f"checkpoints of ResNet-18 take {resnet:,} bytes; LeNet has room"
        return Check("output", shown, WARNING, advice)
    return Check("output", f"{shown}; checkpoints take 3 MB (LeNet) to 270 MB (ResNet-18)")
