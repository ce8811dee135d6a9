"""Checkpoints: arrays only, never code, each file with its hash, whole or not there.

`checkpoints/step-00000235/` holds `state.npz` and `MANIFEST.json`. The state is that of one
replica, so any strategy on any number of devices can load it.
"""

import dataclasses
import hashlib
import json
import pathlib
import shutil
from collections.abc import Mapping

import numpy as np

from app.errors import CheckpointError
from app.records.files import write_atomically

FORMAT_VERSION = 1
_STATE_FILE, _MANIFEST_FILE = "state.npz", "MANIFEST.json"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A saved state and where in the training it was taken.

    Attributes:
        step: optimizer steps made.
        state: name → array, in the order of the variables: model first, then optimizer.
        origin: what was trained on what, plain values; a run that resumes compares it with its own.
    """

    step: int
    state: dict[str, np.ndarray]
    origin: dict[str, str | int | float]


def weights_sha256(state: Mapping[str, np.ndarray]) -> str:
    """Hashes the model's arrays of a state, in order; optimizer slots are left out."""
    digest = hashlib.sha256()
    for name, array in state.items():
        if name.startswith("model/"):
            digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def save_checkpoint(run_dir: pathlib.Path, checkpoint: Checkpoint) -> None:
    """Saves a checkpoint; the ones before it go once it stands."""
    parent = run_dir / "checkpoints"
    parent.mkdir(exist_ok=True)
    path = parent / f"step-{checkpoint.step:08d}"
    older = [other for other in _checkpoints(run_dir) if other != path]
    write_atomically(path, lambda temporary: _write(temporary, checkpoint))
    for other in older:  # Renamed first: nothing half-deleted is seen under a final name.
        shutil.rmtree(other.rename(other.with_name(f".{other.name}.tmp")))


def _write(directory: pathlib.Path, checkpoint: Checkpoint) -> None:
    directory.mkdir()
    state_path = directory / _STATE_FILE
    # Positions keep the order and are safe as member names, whatever a layer is called.
    arrays = {f"{i:05d}": array for i, array in enumerate(checkpoint.state.values())}
    np.savez(state_path, **arrays)
    manifest = {
        "format_version": FORMAT_VERSION,
        "step": checkpoint.step,
        "origin": checkpoint.origin,
        "arrays": [
            {"name": name, "shape": list(array.shape), "dtype": str(array.dtype)}
            for name, array in checkpoint.state.items()
        ],
        "size_bytes": state_path.stat().st_size,
        "sha256": _file_sha256(state_path),
    }
    (directory / _MANIFEST_FILE).write_text(json.dumps(manifest, indent=2), encoding="utf-8")


def load_newest_checkpoint(run_dir: pathlib.Path) -> Checkpoint | None:
    """Loads the newest checkpoint of a run, None where it has none.

    Raises:
        CheckpointError: it is damaged.
    """
    paths = _checkpoints(run_dir)
    if not paths:
        return None
    try:
        return _load(paths[-1])
    except CheckpointError:
        if paths[-1].exists():
            raise
        return load_newest_checkpoint(run_dir)  # The run has just replaced it by a newer one.


def _checkpoints(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the finished checkpoints by step; temporary ones begin with a dot."""
    return sorted(run_dir.glob("checkpoints/step-*"))


def _load(path: pathlib.Path) -> Checkpoint:
    try:
        manifest = json.loads((path / _MANIFEST_FILE).read_text(encoding="utf-8"))
        state_path = path / _STATE_FILE
        if manifest["format_version"] != FORMAT_VERSION:
            raise ValueError(f"format version {manifest['format_version']}")
        if _file_sha256(state_path) != manifest["sha256"]:
            raise ValueError(f"{_STATE_FILE} has another SHA-256 than {_MANIFEST_FILE} says")
        with np.load(state_path, allow_pickle=False) as members:
            state = {
                described["name"]: members[f"{i:05d}"]
                for i, described in enumerate(manifest["arrays"])
            }
        return Checkpoint(int(manifest["step"]), state, dict(manifest["origin"]))
    except Exception as error:  # A crafted or damaged file may raise anything.
        raise CheckpointError(
            f"{path}: unusable checkpoint ({error}) — one that verifies is required;"
            " train again into another directory"
        ) from error


def _file_sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
