"""Saves and loads checkpoints, which hold arrays and no code, with a hash of each file.

`checkpoints/step-00000235-epoch-0001/`, named by the optimizer steps and the finished epochs, holds
`state.safetensors` and `MANIFEST.json`. The state has one copy of the weights, so that any strategy
on any number of devices can load it. The per-replica BatchNorm statistics are stored as
`statistics/REPLICA/POSITION`, so that a training with the same number of replicas resumes bitwise
identically.
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
from typing import NamedTuple

import numpy as np
import safetensors.numpy

from app.records.files import (
    discard,
    io_errors_as,
    make_directory,
    open_regular,
    read_json,
    write_atomically,
)
from app.records.history import checked_record
from app.records.run_metadata import Progress, RunMetadata
from app.runtime.errors import CheckpointError, OutputError, reason_of

FORMAT_VERSION = 4
NUM_NEWEST_KEPT = 3
_SIZE_BYTES_OF_NAMES = 64 << 10  # Approximate size of the manifest and of the arrays' names.
_STATE_FILE, _MANIFEST_FILE = "state.safetensors", "MANIFEST.json"
_OWN = "statistics/"  # Other names start with model/ or optimizer/.
# Errors of missing or replaced files. Other errors of the system may be temporary.
_MEANS_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
# Names of format 3 have no epoch; such checkpoints are refused, not overlooked.
_NAME = re.compile(r"step-(\d{8,})(?:-epoch-(\d{4,}))?")


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


class CheckpointSearchResult(NamedTuple):
    """The newest checkpoint that verifies.

    Attributes:
        checkpoint: the verified checkpoint.
        path: its directory.
        damaged: newer checkpoints that failed verification, each with the reason, newest first.
    """

    checkpoint: Checkpoint
    path: pathlib.Path
    damaged: list[tuple[pathlib.Path, str]]

    def warning(self) -> str | None:
        """Text that names the damaged checkpoints and the selected one; None if none is damaged."""
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
    arrays = dict(checkpoint.state)
    for replica_id, own in enumerate(checkpoint.per_shard_statistics):
        arrays |= {f"{_OWN}{replica_id}/{position}": array for position, array in enumerate(own)}

    def write(directory: pathlib.Path) -> None:
        directory.mkdir()
        content = _array_bytes(arrays)
        (directory / _STATE_FILE).write_bytes(content)
        manifest = _manifest(checkpoint, content)
        (directory / _MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    size_bytes = sum(array.nbytes for array in arrays.values()) + _SIZE_BYTES_OF_NAMES
    path = parent / _name(checkpoint.progress)
    write_atomically(path, write, size_bytes=size_bytes)
    discard(checkpoint_paths(run_dir)[:-NUM_NEWEST_KEPT])
    return path


def _array_bytes(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Returns the content of a safetensors file, which keeps the order in its metadata."""
    in_order = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    return safetensors.numpy.save(in_order, metadata={"order": json.dumps(list(arrays))})


def _arrays_of(content: bytes) -> dict[str, np.ndarray]:
    """Returns the arrays of a safetensors file; the library sorts them by dtype and name."""
    arrays = safetensors.numpy.load(content)
    (header_size,) = struct.unpack_from("<Q", content)
    header = json.loads(content[8 : 8 + header_size])
    return {name: arrays[name] for name in json.loads(header["__metadata__"]["order"])}


def _manifest(checkpoint: Checkpoint, content: bytes) -> dict:
    """Returns the manifest: metadata, progress and the hashes of both files."""
    sha256 = hashlib.sha256(content).hexdigest()
    manifest = {
        "format_version": FORMAT_VERSION,
        "epoch": checkpoint.progress.epoch,
        "metadata": dataclasses.asdict(checkpoint.metadata),
        "progress": dataclasses.asdict(checkpoint.progress),
        "per_shard_statistics": [len(arrays) for arrays in checkpoint.per_shard_statistics],
        "files": {_STATE_FILE: {"size_bytes": len(content), "sha256": sha256}},
    }
    return {**manifest, "sha256": _manifest_sha256(manifest)}


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
    return f"step-{progress.step:08d}-epoch-{progress.epoch:04d}"


def find_newest_checkpoint(run_dir: pathlib.Path) -> CheckpointSearchResult | None:
    """Loads the newest valid checkpoint of a run; None if the run has no checkpoints.

    Raises:
        CheckpointError: the run has checkpoints, but no valid one.
        OutputError: one cannot be read, for a reason that may be temporary.
    """
    damaged: list[tuple[pathlib.Path, str]] = []
    for path in reversed(checkpoint_paths(run_dir)):
        try:
            return CheckpointSearchResult(load_checkpoint(path), path, damaged)
        except CheckpointError as error:
            damaged.append((path, reason_of(error.__cause__ or error)))
    if not damaged:
        return None
    path, reason = damaged[0]
    also = f", as all {len(damaged)} here do not" if len(damaged) > 1 else ""
    raise CheckpointError(
        f"{path}: does not verify ({reason}){also}; train in another directory, or use --overwrite"
    )


def load_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Loads one checkpoint and verifies it.

    Raises:
        CheckpointError: the checkpoint is damaged.
        OutputError: it cannot be read, for a reason that may be temporary.
    """
    try:
        return _load(path)
    except MemoryError:
        raise
    except Exception as error:  # A damaged file, or one of another version, may raise any.
        if isinstance(error, OSError) and error.errno not in _MEANS_DAMAGE:
            raise OutputError(
                f"{path}: cannot be read ({reason_of(error)}); fix that and run the same command"
                " again"
            ) from error
        raise CheckpointError(
            f"{path}: does not verify ({reason_of(error)}); choose another checkpoint"
        ) from error


def _load(path: pathlib.Path) -> Checkpoint:
    metadata, progress, manifest = load_manifest(path)
    with open_regular(path / _STATE_FILE) as file:
        content = file.read()
    expected = manifest["files"][_STATE_FILE]
    if len(content) != expected["size_bytes"]:
        raise ValueError(f"{_STATE_FILE} has {len(content):,} of {expected['size_bytes']:,} bytes")
    if hashlib.sha256(content).hexdigest() != expected["sha256"]:
        raise ValueError(f"{_STATE_FILE} has another SHA-256 than {_MANIFEST_FILE} says")
    state, per_shard_statistics = _arrays_of(content), []
    for replica_id, count in enumerate(manifest["per_shard_statistics"]):
        own = [state.pop(f"{_OWN}{replica_id}/{position}") for position in range(count)]
        per_shard_statistics.append(own)
    return Checkpoint(metadata, progress, state, per_shard_statistics)


def load_manifest(path: pathlib.Path) -> tuple[RunMetadata, Progress, dict]:
    """Returns the contents of a manifest, checked as far as possible without the arrays.

    Raises:
        The exceptions that `load_checkpoint` converts to `CheckpointError`.
    """
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
    progress = Progress.parse(manifest["progress"])
    if path.name != _name(progress):
        raise ValueError(f"{_MANIFEST_FILE} says step {progress.step}, epoch {progress.epoch}")
    return metadata, progress, manifest


def _manifest_sha256(manifest: Mapping) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
