"""Saves and loads checkpoints, which hold arrays and no code, with a hash of each file.

`checkpoints/step-00000235/` holds `state.safetensors` and `MANIFEST.json`. The state has one copy
of the weights, so that any strategy on any number of devices can load it. The per-replica BatchNorm
statistics are stored as `statistics/REPLICA/POSITION`, so that a training with the same number of
replicas resumes bitwise identically.
"""

import dataclasses
import errno
import hashlib
import io
import json
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

import numpy as np

from app.records.arrays import read_arrays, write_arrays
from app.records.files import fsync, io_errors_as, open_regular, read_json, remove, write_atomically
from app.records.history import checked_record
from app.records.run_metadata import Progress, RunMetadata
from app.runtime.errors import CheckpointError, OutputError, reason_of
from app.runtime.fault_points import fault_point

FORMAT_VERSION = 3
NUM_NEWEST_KEPT = 3
# Approximate size of an array's entry in the file's header.
_OVERHEAD_BYTES = 256
_MANIFEST_BYTES = 64 << 10
_STATE_FILE, _MANIFEST_FILE = "state.safetensors", "MANIFEST.json"
_OWN = "statistics/"  # Of a replica; names of the state start with model/ or optimizer/.
_MAX_REPLICAS = 4096
# Errors of missing or damaged files. Other errors may be temporary.
_MEANS_DAMAGE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, None),
}
_NAME = re.compile(r"step-(\d{8,12})")
_MAX_READS = 5  # Of a checkpoint that a running training replaces.
_Read = TypeVar("_Read")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """All that a training needs to resume.

    Attributes:
        metadata: what is trained on which data.
        progress: progress of the training.
        state: name → array, in the order of the variables: model, then optimizer.
        per_shard_statistics: BatchNorm moving statistics of each shard; empty if all shards have
            equal statistics.
    """

    metadata: RunMetadata
    progress: Progress
    state: dict[str, np.ndarray]
    per_shard_statistics: list[list[np.ndarray]] = dataclasses.field(default_factory=list)


def weights_sha256(state: Mapping[str, np.ndarray]) -> str:
    """Hashes the model's arrays of a state, in order, without the optimizer state."""
    digest = hashlib.sha256()
    for name, array in state.items():
        if name.startswith("model/"):
            digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()


def save_checkpoint(run_dir: pathlib.Path, checkpoint: Checkpoint) -> None:
    """Saves a checkpoint, then removes all but the newest three and the best one.

    Replaces a checkpoint of the same step, which was saved before the evaluation.

    Raises:
        DiskFullError: no space; earlier checkpoints are unchanged.
        OutputError: the checkpoint cannot be written.
    """
    parent = _parent(run_dir)
    with io_errors_as(parent):
        fault_point("checkpoint.directory")
        if not parent.is_dir():
            parent.mkdir()
            fsync(run_dir)
    path = parent / _name(checkpoint.progress.step)
    own = checkpoint.per_shard_statistics
    arrays = checkpoint.state | {
        _own_name(r, i): array for r, arrays in enumerate(own) for i, array in enumerate(arrays)
    }

    def write(directory: pathlib.Path) -> None:
        directory.mkdir()
        fault_point("checkpoint.made")
        write_arrays(directory / _STATE_FILE, arrays)
        fault_point("checkpoint.before_manifest")
        manifest = _describe(checkpoint, directory / _STATE_FILE)
        (directory / _MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    size_bytes = sum(array.nbytes + _OVERHEAD_BYTES for array in arrays.values())
    size_bytes += _MANIFEST_BYTES
    write_atomically(path, write, size_bytes=size_bytes, points="checkpoint")
    best = checkpoint.progress.best_epoch
    kept = {_name(best.step)} if best else set()
    others = checkpoint_paths(run_dir)[:-NUM_NEWEST_KEPT]
    if discarded := [other for other in others if other.name not in kept]:
        _discard(discarded)


def _discard(paths: list[pathlib.Path]) -> None:
    """Removes checkpoints; renames them first, so that a name never refers to a partial one."""
    parent = paths[0].parent
    with io_errors_as(parent):
        temporaries = []
        for path in paths:
            temporary = path.with_name(f".{path.name}.tmp")
            fault_point("checkpoint.before_delete")
            remove(temporary)
            temporaries.append(path.rename(temporary))
        fsync(parent)
        for temporary in temporaries:
            remove(temporary)


def _describe(checkpoint: Checkpoint, state_path: pathlib.Path) -> dict:
    """Returns the manifest: metadata, progress and the hashes of both files."""
    manifest = {
        "format_version": FORMAT_VERSION,
        "epoch": checkpoint.progress.epoch,
        "metadata": dataclasses.asdict(checkpoint.metadata),
        "progress": dataclasses.asdict(checkpoint.progress),
        "per_shard_statistics": [len(arrays) for arrays in checkpoint.per_shard_statistics],
        "files": {
            _STATE_FILE: {
                "size_bytes": state_path.stat().st_size,
                "sha256": _file_sha256(state_path),
            }
        },
    }
    return {**manifest, "sha256": _manifest_sha256(manifest)}


def _own_name(replica_id: int, position: int) -> str:
    return f"{_OWN}{replica_id}/{position}"


def checkpoint_paths(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the complete checkpoints by step, ignoring file times."""
    parent = _parent(run_dir)
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OutputError(
            f"{parent}: {reason_of(error)}; check the permissions of the checkpoints"
        ) from error
    named = [(_NAME.fullmatch(name), parent / name) for name in names]
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match)]


def _parent(run_dir: pathlib.Path) -> pathlib.Path:
    parent = run_dir / "checkpoints"
    if parent.is_symlink():
        raise OutputError(
            f"{parent} is a symbolic link, and nothing is written outside of --out; move the"
            " directory that it points to here"
        )
    return parent


def _name(step: int) -> str:
    return f"step-{step:08d}"


def load_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Loads one checkpoint and verifies it.

    Raises:
        CheckpointError: the checkpoint is damaged or forged.
        OutputError: it cannot be read, for a reason that may be temporary.
    """
    try:
        return _unless_replaced(path, _load)
    except Exception as error:  # A crafted or damaged file may raise any exception.
        if isinstance(error, MemoryError):
            raise
        if isinstance(error, OSError) and error.errno not in _MEANS_DAMAGE:
            raise OutputError(
                f"{path}: cannot be read ({reason_of(error)}); fix that and run the same command"
                " again"
            ) from error
        raise CheckpointError(
            f"{path}: does not verify ({reason_of(error)}); choose another checkpoint"
        ) from error


def _unless_replaced(path: pathlib.Path, read: Callable[[pathlib.Path], _Read]) -> _Read:
    """Calls `read`, again if a running training has replaced the checkpoint meanwhile."""
    for _ in range(_MAX_READS - 1):
        identity = _identity(path)
        try:
            return read(path)
        except Exception:
            if _identity(path) == identity:
                raise
    return read(path)


def _identity(path: pathlib.Path) -> tuple[int, ...] | None:
    """Returns values that change if a checkpoint is replaced; None if it does not exist."""
    try:
        status = path.lstat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


def _load(path: pathlib.Path) -> Checkpoint:
    metadata, progress, manifest = _load_manifest(path)
    counts = manifest["per_shard_statistics"]
    if len(counts) > _MAX_REPLICAS:
        raise ValueError(f"{len(counts)} replicas")
    with open_regular(path / _STATE_FILE) as file:
        _verify_file(file, **manifest["files"][_STATE_FILE])
        state = read_arrays(file)
    own = [[state.pop(_own_name(r, i)) for i in range(count)] for r, count in enumerate(counts)]
    if surplus := [name for name in state if name.startswith(_OWN)]:
        raise ValueError(f"{surplus[0]:.80} belongs to no replica")
    return Checkpoint(metadata, progress, state, own)


def load_manifest(path: pathlib.Path) -> tuple[RunMetadata, Progress, dict]:
    """Returns the contents of a manifest, checked as far as possible without the arrays.

    Raises:
        The exceptions that `load_checkpoint` converts to `CheckpointError`.
    """
    return _unless_replaced(path, _load_manifest)


def _load_manifest(path: pathlib.Path) -> tuple[RunMetadata, Progress, dict]:
    if path.is_symlink():
        raise ValueError("a symbolic link")
    manifest = read_json(path / _MANIFEST_FILE)
    if (version := manifest["format_version"]) != FORMAT_VERSION:
        raise ValueError(
            f"format version {version!s:.20}, which another version of this program wrote; this one"
            f" reads {FORMAT_VERSION}"
        )
    if manifest.pop("sha256") != _manifest_sha256(manifest):
        raise ValueError(f"{_MANIFEST_FILE} has another SHA-256 than it says")
    metadata = checked_record(RunMetadata, manifest["metadata"])
    progress = Progress.parse(manifest["progress"], metadata.steps_per_epoch)
    if path.name != _name(progress.step):
        raise ValueError(f"{_MANIFEST_FILE} says step {progress.step}")
    return metadata, progress, manifest


def _verify_file(file: io.BufferedReader, *, size_bytes: int, sha256: str) -> None:
    found_bytes = file.seek(0, os.SEEK_END)
    if found_bytes != size_bytes:
        raise ValueError(f"{_STATE_FILE} has {found_bytes:,} of {size_bytes:,} bytes")
    file.seek(0)
    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
        raise ValueError(f"{_STATE_FILE} has another SHA-256 than {_MANIFEST_FILE} says")


def _file_sha256(path: pathlib.Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_sha256(manifest: Mapping) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
