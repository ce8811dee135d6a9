"""Checkpoints: arrays only, never code, each file with its hash, whole or not there.

`checkpoints/step-00000235/` holds `state.npz` and `MANIFEST.json`. The state is that of one
replica, so any strategy on any number of devices can load it; what each replica keeps for itself
lies beside it, for the same number of them to go on bit for bit.
"""

import dataclasses
import errno
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from app.errors import CheckpointError, OutputError, reason_of
from app.fault_points import fault_point
from app.records.arrays import ArraySpec, read_arrays, write_arrays
from app.records.files import (
    fsync,
    open_regular,
    read_json,
    remove,
    told_of,
    write_atomically,
)
from app.records.history import EpochRecord, checked_record

FORMAT_VERSION = 2
NUM_NEWEST_KEPT = 3
# What an array takes in both files beside its values, about.
_OVERHEAD_BYTES = 1024
_STATE_FILE, _MANIFEST_FILE = "state.npz", "MANIFEST.json"
# A run that goes on may replace what is being read, this often at most.
_MAX_TRIES = 5
_MAX_REPLICAS = 4096
# What is not there, or not what it has to be. Another error may pass: it is no damage.
_MEANS_DAMAGE = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.ENODEV, None),
}
_NAME = re.compile(r"step-(\d{8,12})")


@dataclasses.dataclass(frozen=True)
class Origin:
    """What was trained on what. A run that resumes compares it with its own.

    Attributes:
        config: the flags that a result depends on: model, precision, seed, recipe, batch and so on.
        learning_rate: the peak, the recipe's own where no flag gave one.
        steps_per_epoch: batches of an epoch.
        dataset: name of the images.
        dataset_sha256: of all of them, in order.
        test_part_sha256: of the test part.
        num_replicas: how many copies of the model were trained.
        versions: of everything that numbers depend on.
    """

    config: dict
    learning_rate: float
    steps_per_epoch: int
    dataset: str
    dataset_sha256: str
    test_part_sha256: str
    num_replicas: int
    versions: dict


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far a training is.

    Attributes:
        step: optimizer steps made since the start.
        epoch_step: how many of them in the epoch under way, which is its position in the data.
        loss_sum: over the examples of the epoch under way.
        correct: likewise.
        examples: likewise.
        epoch_sec: of training in the epoch under way.
        statistics_apart: see `EpochRecord`, where the epoch under way is being evaluated.
        total_sec: since the start, in all attempts.
        history: the epochs that are finished.
        changes: what was changed on the way, a line each.
    """

    step: int = 0
    epoch_step: int = 0
    loss_sum: float = 0.0
    correct: int = 0
    examples: int = 0
    epoch_sec: float = 0.0
    statistics_apart: float = 0.0
    total_sec: float = 0.0
    history: list[EpochRecord] = dataclasses.field(default_factory=list)
    changes: list[str] = dataclasses.field(default_factory=list)

    @property
    def epoch(self) -> int:
        """How many epochs are finished."""
        return len(self.history)

    @property
    def best_epoch(self) -> EpochRecord | None:
        """The first of those with the highest test accuracy."""
        return max(self.history, key=lambda record: record.test_accuracy, default=None)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """All that a training needs to go on as if nothing had happened.

    Attributes:
        origin: what is trained on what.
        progress: how far it is.
        state: name → array, in the order of the variables: model first, then optimizer.
        replica_statistics: each replica's own moving statistics; empty where they keep none apart.
    """

    origin: Origin
    progress: Progress
    state: dict[str, np.ndarray]
    replica_statistics: list[list[np.ndarray]] = dataclasses.field(default_factory=list)


def weights_sha256(state: Mapping[str, np.ndarray]) -> str:
    """Hashes the model's arrays of a state, in order; optimizer slots are left out."""
    digest = hashlib.sha256()
    for name, array in state.items():
        if name.startswith("model/"):
            digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()


def save_checkpoint(run_dir: pathlib.Path, checkpoint: Checkpoint) -> None:
    """Saves a checkpoint; once it stands, all but the newest three and the best one go.

    One of the same step is replaced: that of an interrupted evaluation by that of its end.

    Raises:
        DiskFullError: no space; those before it are left as they are.
        OutputError: it cannot be written there.
    """
    parent = _parent(run_dir)
    with told_of(parent):
        fault_point("checkpoint.directory")
        if not parent.is_dir():
            parent.mkdir()
            fsync(run_dir)
    path = parent / _name(checkpoint.progress.step)
    arrays = [*checkpoint.state.values(), *itertools.chain(*checkpoint.replica_statistics)]

    def write(directory: pathlib.Path) -> None:
        directory.mkdir()
        fault_point("checkpoint.made")
        write_arrays(directory / _STATE_FILE, arrays)
        manifest = _describe(checkpoint, directory / _STATE_FILE)
        (directory / _MANIFEST_FILE).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    size_bytes = sum(array.nbytes + _OVERHEAD_BYTES for array in arrays)
    write_atomically(path, write, size_bytes=size_bytes, points="checkpoint")
    best = checkpoint.progress.best_epoch
    kept = {_name(best.step)} if best else set()
    for other in checkpoint_paths(run_dir)[:-NUM_NEWEST_KEPT]:
        if other.name not in kept:
            _discard(other)


def _discard(path: pathlib.Path) -> None:
    """Removes a checkpoint; renamed first, so that nothing half-deleted is seen under its name."""
    temporary = path.with_name(f".{path.name}.tmp")
    with told_of(path):
        fault_point("checkpoint.before_delete")
        remove(temporary)
        remove(path.rename(temporary))


def _describe(checkpoint: Checkpoint, state_path: pathlib.Path) -> dict:
    """Returns the manifest: what the arrays are, what they stand for, and the hashes of both."""
    manifest = {
        "format_version": FORMAT_VERSION,
        "epoch": checkpoint.progress.epoch,
        "origin": dataclasses.asdict(checkpoint.origin),
        "progress": dataclasses.asdict(checkpoint.progress),
        "arrays": [
            {"name": name, **ArraySpec.of(array)._asdict()}
            for name, array in checkpoint.state.items()
        ],
        "replica_statistics": [
            [ArraySpec.of(array)._asdict() for array in arrays]
            for arrays in checkpoint.replica_statistics
        ],
        "files": {
            _STATE_FILE: {
                "size_bytes": state_path.stat().st_size,
                "sha256": _file_sha256(state_path),
            }
        },
    }
    return {**manifest, "sha256": _manifest_sha256(manifest)}


class Found(NamedTuple):
    """What a search for a checkpoint came to.

    Attributes:
        checkpoint: the newest that verifies.
        path: where it is.
        damaged: newer ones that do not, the newest first, each with the reason.
    """

    checkpoint: Checkpoint
    path: pathlib.Path
    damaged: list[tuple[pathlib.Path, str]]

    def warning(self) -> str | None:
        """Names the damaged ones and what is used in their place; None where none is."""
        if not self.damaged:
            return None
        told = "; ".join(f"{path} ({reason})" for path, reason in self.damaged)
        return f"damaged checkpoint: {told}. {self.path} is used, the newest one that verifies"


def find_newest_checkpoint(run_dir: pathlib.Path) -> Found | None:
    """Loads the newest checkpoint of a run that verifies; None where it has none at all.

    Raises:
        CheckpointError: there are some, but none that verifies.
    """
    for _ in range(_MAX_TRIES):
        damaged: list[tuple[pathlib.Path, str]] = []
        for path in reversed(checkpoint_paths(run_dir)):
            try:
                return Found(load_checkpoint(path), path, damaged)
            except CheckpointError as error:
                damaged.append((path, reason_of(error.__cause__)))
        if not damaged:
            return None
        if all(os.path.lexists(path) for path, _ in damaged):
            break  # Else a run that goes on has just replaced them by newer ones.
    path, reason = damaged[0]
    others = f", nor do the {len(damaged) - 1} before it" if len(damaged) > 1 else ""
    raise CheckpointError(
        f"{path}: does not verify ({reason}){others} — one that does is required;"
        " train again into another directory, or use --overwrite"
    )


def find_best_checkpoint(run_dir: pathlib.Path) -> Found | None:
    """Loads the checkpoint with the highest test accuracy of those that end an epoch and verify.

    The newest one where none ends an epoch; None where there is none at all.

    Raises:
        CheckpointError: there are some, but none that verifies.
    """
    accuracies, damaged = {}, []
    for path in checkpoint_paths(run_dir):
        try:
            progress = _load_manifest(path)[1]
        except Exception as error:
            damaged.append((path, reason_of(error)))
            continue
        if progress.history and not progress.epoch_step:
            accuracies[path] = progress.history[-1].test_accuracy
    for path in sorted(accuracies, key=accuracies.get, reverse=True):
        try:
            return Found(load_checkpoint(path), path, damaged)
        except CheckpointError as error:
            damaged.append((path, reason_of(error.__cause__)))
    return find_newest_checkpoint(run_dir)


def set_aside(path: pathlib.Path) -> None:
    """Gives a damaged checkpoint a name under which nothing will look for it again."""
    aside = path.with_name(f"damaged-{path.name}")
    with told_of(path):
        remove(aside)
        path.rename(aside)


def checkpoint_paths(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the finished checkpoints by step, whatever the times of their files say."""
    parent = _parent(run_dir)
    try:
        names = os.listdir(parent)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise OutputError(
            f"{parent}: {reason_of(error)} — checkpoints that can be read are required; check its"
            " permissions"
        ) from error
    named = [(_NAME.fullmatch(name), parent / name) for name in names]
    return [path for _, path in sorted((int(match[1]), path) for match, path in named if match)]


def _parent(run_dir: pathlib.Path) -> pathlib.Path:
    parent = run_dir / "checkpoints"
    if parent.is_symlink():
        raise OutputError(
            f"{parent} is a symbolic link — a directory is required, for nothing is written"
            " outside of --out; move what it leads to here"
        )
    return parent


def _name(step: int) -> str:
    return f"step-{step:08d}"


def load_checkpoint(path: pathlib.Path) -> Checkpoint:
    """Loads one checkpoint, believing nothing that it does not prove.

    Raises:
        CheckpointError: it is damaged, or was made up.
        OutputError: it cannot be read now, for a reason that may pass.
    """
    try:
        return _load(path)
    except Exception as error:  # A crafted or damaged file may raise anything.
        if isinstance(error, MemoryError):
            raise
        if isinstance(error, OSError) and error.errno not in _MEANS_DAMAGE:
            raise OutputError(
                f"{path}: cannot be read ({reason_of(error)}) — a checkpoint that can be read is"
                " required; mend that, and run the same command again"
            ) from error
        raise CheckpointError(
            f"{path}: does not verify ({reason_of(error)}) — one that does is required; choose"
            " another"
        ) from error


def _load(path: pathlib.Path) -> Checkpoint:
    origin, progress, manifest = _load_manifest(path)
    names = [described["name"] for described in manifest["arrays"]]
    if not all(isinstance(name, str) for name in names) or len(set(names)) != len(names):
        raise ValueError("arrays without a name of their own")
    specs = _parse_specs(manifest["arrays"])
    if len(manifest["replica_statistics"]) > _MAX_REPLICAS:
        raise ValueError(f"{len(manifest['replica_statistics'])} replicas")
    per_replica_specs = [_parse_specs(list_) for list_ in manifest["replica_statistics"]]
    _verify_file(path / _STATE_FILE, **manifest["files"][_STATE_FILE])
    all_specs = [*specs, *itertools.chain(*per_replica_specs)]
    arrays = iter(read_arrays(path / _STATE_FILE, all_specs))
    state = {name: next(arrays) for name in names}
    statistics = [[next(arrays) for _ in list_] for list_ in per_replica_specs]
    return Checkpoint(origin, progress, state, statistics)


def _load_manifest(path: pathlib.Path) -> tuple[Origin, Progress, dict]:
    """Returns what a manifest tells, checked as far as it goes without the arrays."""
    if path.is_symlink():
        raise ValueError("a symbolic link")
    manifest = read_json(path / _MANIFEST_FILE)
    if manifest["format_version"] != FORMAT_VERSION:
        raise ValueError(
            f"format version {manifest['format_version']!s:.20}, this program reads"
            f" {FORMAT_VERSION}"
        )
    if manifest.pop("sha256") != _manifest_sha256(manifest):
        raise ValueError(f"{_MANIFEST_FILE} has another SHA-256 than it says")
    origin = checked_record(Origin, manifest["origin"])
    progress = _parse_progress(manifest["progress"], origin.steps_per_epoch)
    if path.name != _name(progress.step):
        raise ValueError(f"{_MANIFEST_FILE} says step {progress.step}")
    return origin, progress, manifest


def _parse_progress(values: dict, steps_per_epoch: int) -> Progress:
    history = [checked_record(EpochRecord, record) for record in values["history"]]
    progress = checked_record(Progress, {**values, "history": history})
    if not 0 <= progress.epoch_step <= min(progress.step, steps_per_epoch):
        raise ValueError(f"step {progress.step}, of the epoch {progress.epoch_step}")
    if [record.epoch for record in history] != list(range(1, len(history) + 1)):
        raise ValueError("epochs that do not follow one another")
    steps = [0, *(record.step for record in history), progress.step + 1]
    if any(after <= before for before, after in itertools.pairwise(steps)):
        raise ValueError("epochs whose steps do not rise")
    numbers = [progress.loss_sum, progress.epoch_sec, progress.total_sec]
    for record in history:
        numbers += [v for v in dataclasses.astuple(record) if not isinstance(v, str)]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        raise ValueError("losses, accuracies or times that are no finite numbers")
    if progress.epoch_step and min(progress.examples, progress.epoch_sec) <= 0:
        raise ValueError(f"{progress.epoch_step} steps over {progress.examples} examples")
    return progress


def _parse_specs(described: Sequence[Mapping]) -> list[ArraySpec]:
    return [ArraySpec.parse(one["shape"], one["dtype"]) for one in described]


def _verify_file(path: pathlib.Path, *, size_bytes: int, sha256: str) -> None:
    with open_regular(path) as file:
        found_bytes = file.seek(0, 2)
    if found_bytes != size_bytes:
        raise ValueError(f"{path.name} has {found_bytes:,} of {size_bytes:,} bytes")
    if _file_sha256(path) != sha256:
        raise ValueError(f"{path.name} has another SHA-256 than {_MANIFEST_FILE} says")


def _file_sha256(path: pathlib.Path) -> str:
    with open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _manifest_sha256(manifest: Mapping) -> str:
    text = json.dumps(manifest, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
