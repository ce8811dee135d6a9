"""Saves and loads checkpoints: arrays and no code, with metadata and a hash, in one file each.

`checkpoints/step-00000235-epoch-0001.safetensors`, named by the optimizer steps and the finished
epochs, has one copy of the weights, so that any strategy on any number of devices can load it. The
per-replica BatchNorm statistics are stored as `statistics/REPLICA/POSITION`, so that a training
with the same number of replicas resumes bitwise identically. The header has two texts: `checkpoint`
is JSON, and `sha256` the hash of the file with 64 zeros in the place of this hash.
"""

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import safetensors.numpy

from app.records.files import io_errors_as, make_directory, open_regular, remove, write_file
from app.records.history import checked_record
from app.records.run_metadata import Progress, RunMetadata, is_finished
from app.runtime.errors import CheckpointError, OutputError, reason_of

FORMAT_VERSION = 5
NUM_NEWEST_KEPT = 3
_OWN = "statistics/"  # Other names start with model/ or optimizer/.
_NO_HASH = "0" * 64
# Errors of missing or replaced files. Other errors of the system may be temporary.
_MEANS_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
# Formats before 5 are directories, format 3 without an epoch: they are refused, not overlooked.
_NAME = re.compile(r"step-(\d{8,})(?:-epoch-(\d{4,})(\.safetensors)?)?")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """All that a training needs to resume.

    Attributes:
        metadata: what is trained on which data.
        progress: progress of the training.
        state: name → array, in the order of the variables: model, then optimizer.
        per_shard_statistics: BatchNorm moving statistics of each shard; empty if all shards have
            equal statistics.
        path: the file that it was loaded from; None for a new one.
        damaged: newer files that failed verification, each with the reason, newest first.
    """

    metadata: RunMetadata
    progress: Progress
    state: dict[str, np.ndarray]
    per_shard_statistics: list[list[np.ndarray]] = dataclasses.field(default_factory=list)
    path: pathlib.Path | None = None
    damaged: list[tuple[pathlib.Path, str]] = dataclasses.field(default_factory=list)

    def warning(self) -> str | None:
        """Text that names the damaged checkpoints and this one; None if none is damaged."""
        if not self.damaged:
            return None
        damages = "; ".join(f"{path} ({reason})" for path, reason in self.damaged)
        return f"damaged checkpoint: {damages}. {self.path} is used, the newest that verifies"


def weights_sha256(state: Mapping[str, np.ndarray]) -> str:
    """Hashes the model's arrays of a state, in order, without the optimizer state."""
    digest = hashlib.sha256()
    for name, array in state.items():
        if name.startswith("model/"):
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def save_checkpoint(run_dir: pathlib.Path, checkpoint: Checkpoint) -> pathlib.Path:
    """Saves a checkpoint, then removes all but the newest three; returns its path.

    Raises:
        DiskFullError: no space; earlier checkpoints are unchanged.
        OutputError: the checkpoint cannot be written.
    """
    parent = _parent(run_dir)
    with io_errors_as(parent):
        make_directory(parent)
    path = parent / _name(checkpoint.progress)
    write_file(path, _to_bytes(checkpoint))
    for old in checkpoint_paths(run_dir)[:-NUM_NEWEST_KEPT]:
        remove(old)
    return path


def _to_bytes(checkpoint: Checkpoint) -> bytes:
    """Returns the content of a checkpoint's file."""
    arrays = dict(checkpoint.state)
    for replica_id, own in enumerate(checkpoint.per_shard_statistics):
        arrays |= {f"{_OWN}{replica_id}/{position}": array for position, array in enumerate(own)}
    about = {
        "format_version": FORMAT_VERSION,
        "metadata": dataclasses.asdict(checkpoint.metadata),
        "progress": dataclasses.asdict(checkpoint.progress),
        "order": list(checkpoint.state),  # The library sorts arrays by dtype and name.
        "per_shard_statistics": [len(own) for own in checkpoint.per_shard_statistics],
    }
    content = safetensors.numpy.save(
        {name: np.asarray(array, order="C") for name, array in arrays.items()},
        metadata={"checkpoint": json.dumps(about), "sha256": _NO_HASH},
    )
    return content.replace(_entry(_NO_HASH), _entry(_sha256(content, _NO_HASH)), 1)


def _entry(sha256: str) -> bytes:
    return f'"sha256":"{sha256}"'.encode()


def _sha256(content: bytes, own: str) -> str:
    """Hashes a file, with zeros in the place of its own hash."""
    entry = _entry(own)
    start = content.index(entry)
    digest = hashlib.sha256(content[:start] + _entry(_NO_HASH))
    digest.update(memoryview(content)[start + len(entry) :])
    return digest.hexdigest()


def checkpoint_paths(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the complete checkpoints by step and epoch, ignoring file times."""
    parent = _parent(run_dir)
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OutputError(
            f"{parent}: {reason_of(error)}; check the permissions of the checkpoints"
        ) from error
    found = []
    for name in names:
        if match := _NAME.fullmatch(name):
            found.append((int(match[1]), int(match[2] or 0), parent / name))
    return [path for _, _, path in sorted(found)]


def _parent(run_dir: pathlib.Path) -> pathlib.Path:
    parent = run_dir / "checkpoints"
    if parent.is_symlink():
        raise OutputError(
            f"{parent} is a symbolic link, and nothing is written outside of --out; move the"
            " directory that it points to here"
        )
    return parent


def _name(progress: Progress) -> str:
    return f"step-{progress.step:08d}-epoch-{progress.epoch:04d}.safetensors"


def find_newest_checkpoint(run_dir: pathlib.Path) -> Checkpoint | None:
    """Loads the newest valid checkpoint of a run; None if the run has no checkpoints.

    Raises:
        CheckpointError: the run has checkpoints, but no valid one.
        OutputError: one cannot be read, for a reason that may be temporary.
    """
    damaged: list[tuple[pathlib.Path, str]] = []
    for path in reversed(checkpoint_paths(run_dir)):
        try:
            return dataclasses.replace(_load(path), path=path, damaged=damaged)
        except MemoryError:
            raise
        except Exception as error:  # A damaged file, or one of another version, may raise any.
            if isinstance(error, OSError) and error.errno not in _MEANS_DAMAGE:
                raise OutputError(
                    f"{path}: cannot be read ({reason_of(error)}); fix that and run the same"
                    " command again"
                ) from error
            damaged.append((path, reason_of(error)))
    if not damaged:
        return None
    path, reason = damaged[0]
    also = f", as all {len(damaged)} here do not" if len(damaged) > 1 else ""
    raise CheckpointError(
        f"{path}: does not verify ({reason}){also}; train in another directory, or use --overwrite"
    )


def load_finished(run_dir: pathlib.Path) -> Checkpoint:
    """Loads the last checkpoint of a finished training.

    Raises:
        CheckpointError: the training is not finished, or its last checkpoint is damaged.
        OutputError: it cannot be read.
    """
    found = find_newest_checkpoint(run_dir)
    if found is None:
        raise CheckpointError(f"{run_dir} has no checkpoint; use --overwrite")
    if not is_finished(found.metadata, found.progress):
        raise CheckpointError(
            f"{found.warning() or found.path}: the training is not finished; run the same command"
            " again, or use --overwrite"
        )
    return found


def _load(path: pathlib.Path) -> Checkpoint:
    if path.suffix != ".safetensors":
        raise ValueError("written by version 1 of this program, which alone can read it")
    with open_regular(path) as file:
        content = file.read()
    header = _header(content)
    about = json.loads(header["checkpoint"])
    if (version := about["format_version"]) != FORMAT_VERSION:
        raise ValueError(
            f"format version {version!s:.20}, which another version of this program wrote; this one"
            f" reads {FORMAT_VERSION}"
        )
    if _sha256(content, header["sha256"]) != header["sha256"]:
        raise ValueError("its SHA-256 is not that in its header")
    metadata = checked_record(RunMetadata, about["metadata"])
    progress = Progress.parse(about["progress"])
    if path.name != _name(progress):
        raise ValueError(f"the header says step {progress.step}, epoch {progress.epoch}")
    arrays = safetensors.numpy.load(content)  # Checks shapes and offsets before it reads.
    own = [
        [arrays[f"{_OWN}{replica_id}/{position}"] for position in range(count)]
        for replica_id, count in enumerate(about["per_shard_statistics"])
    ]
    return Checkpoint(metadata, progress, {name: arrays[name] for name in about["order"]}, own)


def _header(content: bytes) -> dict[str, Any]:
    """Returns the texts in the header of a safetensors file."""
    (size_bytes,) = struct.unpack_from("<Q", content)
    if size_bytes > len(content) - 8:
        raise ValueError(f"{len(content):,} bytes, fewer than its header needs")
    return json.loads(content[8 : 8 + size_bytes])["__metadata__"]
