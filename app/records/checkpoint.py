"""Saves and loads checkpoints, from which all other records of a training are written.

`checkpoints/step-00000235-epoch-0001.safetensors`, named by the optimizer steps and the finished
epochs, has arrays and no code: one copy of weights and optimizer state, and BatchNorm statistics of
each shard as `statistics/SHARD/POSITION`. The header has two texts: `checkpoint` is JSON, and
`sha256` the hash of the file with 64 zeros in the place of this hash.
"""

import dataclasses
import errno
import hashlib
import json
import os
import pathlib
import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import safetensors.numpy

from app import console
from app.errors import CheckpointError, LockstepError, OutputError, reason_of
from app.records import files
from app.records.history import (
    HISTORY_FILE,
    Draw,
    EpochRecord,
    RunMetadata,
    checked,
    finished,
    is_complete,
    summarize,
    write_history,
)
from app.records.run_directory import (
    CHECKPOINTS,
    HEADER,
    RunDirectory,
    check_same_run,
    literal_options,
    version_2_error,
)

FORMAT_VERSION = 6
_NO_HASH = b"0" * 64
# Errors of missing or replaced files. Other errors of the system may be temporary.
_MEANS_DAMAGE = {errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP}
# Formats before 5 are directories, format 3 without an epoch: they are refused, not overlooked.
_NAME = re.compile(r"step-(\d{8,})(?:-epoch-(\d{4,})(\.safetensors)?)?")


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """All that a training needs to resume."""

    metadata: RunMetadata
    epochs: Sequence[EpochRecord]  # The last one may be unfinished.
    state: Mapping[str, np.ndarray]  # In the order of the variables: model, then optimizer.
    per_shard_statistics: Sequence[Sequence[np.ndarray]] = ()  # Empty if all shards' are equal.
    path: pathlib.Path | None = None  # The file that it was loaded from.
    damaged: Sequence[tuple[pathlib.Path, str]] = ()  # Newer files with the reasons, newest first.

    @property
    def step(self) -> int:
        """Optimizer steps since the start of the run."""
        return self.epochs[-1].step if self.epochs else 0

    @property
    def name(self) -> str:
        """The name of its file."""
        return f"step-{self.step:08d}-epoch-{len(finished(self.epochs)):04d}.safetensors"

    def warning(self) -> str:
        """Returns a text that names the damaged checkpoints and this one; "" without damage."""
        if not self.damaged:
            return ""
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
    """Saves a checkpoint, then removes all but the newest three; returns its path."""
    path = run_dir / CHECKPOINTS / checkpoint.name
    with files.io_errors_as(path.parent):
        files.make_directory(path.parent)
    files.write_file(path, _to_bytes(checkpoint))
    for old in checkpoint_paths(run_dir)[:-3]:
        files.remove(old)
    return path


def _to_bytes(checkpoint: Checkpoint) -> bytes:
    arrays = dict(checkpoint.state)
    for shard_id, own in enumerate(checkpoint.per_shard_statistics):
        arrays |= {f"statistics/{shard_id}/{position}": array for position, array in enumerate(own)}
    about = {
        "format_version": FORMAT_VERSION,
        "metadata": dataclasses.asdict(checkpoint.metadata),
        "epochs": [dataclasses.asdict(record) for record in checkpoint.epochs],
        "order": list(checkpoint.state),  # The library sorts arrays by dtype and name.
        "per_shard_statistics": [len(own) for own in checkpoint.per_shard_statistics],
    }
    content = safetensors.numpy.save(
        {name: np.asarray(array, order="C") for name, array in arrays.items()},
        metadata={"checkpoint": json.dumps(about), "sha256": _NO_HASH.decode()},
    )
    return content.replace(_NO_HASH, hashlib.sha256(content).hexdigest().encode(), 1)


def checkpoint_paths(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Returns the complete checkpoints by step and epoch, ignoring file times."""
    parent = run_dir / CHECKPOINTS
    try:
        matches = [match for name in os.listdir(parent) if (match := _NAME.fullmatch(name))]
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _not_readable(parent, error) from error
    matches.sort(key=lambda match: (int(match[1]), int(match[2] or 0)))
    return [parent / match[0] for match in matches]


def _not_readable(path: pathlib.Path, error: OSError) -> OutputError:
    return OutputError(
        f"{path}: cannot be read ({reason_of(error)}); fix that and run the same command again"
    )


def find_newest_checkpoint(run_dir: pathlib.Path) -> Checkpoint | None:
    """Loads the newest valid checkpoint of a run; None if nothing was saved.

    Raises CheckpointError if none is valid, one is of another version, or all of them are lost, and
    OutputError if one cannot be read for a reason that may be temporary.
    """
    damaged: list[tuple[pathlib.Path, str]] = []
    for path in reversed(checkpoint_paths(run_dir)):
        try:
            return dataclasses.replace(_load(path), path=path, damaged=damaged)
        except (LockstepError, MemoryError):
            raise
        except Exception as error:  # A damaged file may raise any.
            if isinstance(error, OSError) and error.errno not in _MEANS_DAMAGE:
                raise _not_readable(path, error) from error
            damaged.append((path, reason_of(error)))
    if damaged:
        path, reason = damaged[0]
        also = f", as all {len(damaged)} here do not" if len(damaged) > 1 else ""
        problem = f"{path}: does not verify ({reason}){also}; train in another directory"
    elif (run_dir / HISTORY_FILE).exists():
        problem = f"{run_dir} has a history, but no checkpoint; restore the checkpoints"
    else:
        return None
    raise CheckpointError(f"{problem}, or use --overwrite")


def _load(path: pathlib.Path) -> Checkpoint:
    if path.suffix != ".safetensors":
        raise version_2_error(path)
    content = files.read_bytes(path)
    (size_bytes,) = struct.unpack_from("<Q", content)
    if size_bytes > len(content) - 8:
        raise ValueError(f"{len(content):,} bytes, fewer than its header needs")
    header = json.loads(content[8 : 8 + size_bytes])["__metadata__"]
    about = json.loads(header["checkpoint"])
    without = content.replace(header["sha256"].encode(), _NO_HASH, 1)
    if hashlib.sha256(without).hexdigest() != header["sha256"]:
        raise ValueError("its SHA-256 is not that in its header")
    if about["format_version"] != FORMAT_VERSION:
        raise version_2_error(path)
    arrays = safetensors.numpy.load(content)  # Checks shapes and offsets before it reads.
    checkpoint = Checkpoint(
        checked(RunMetadata(**about["metadata"])),
        [checked(EpochRecord(**values)) for values in about["epochs"]],
        {name: arrays[name] for name in about["order"]},
        [
            [arrays[f"statistics/{shard_id}/{position}"] for position in range(count)]
            for shard_id, count in enumerate(about["per_shard_statistics"])
        ],
    )
    if path.name != checkpoint.name or not checkpoint.epochs:
        raise ValueError(f"by its header it is {checkpoint.name}")
    return checkpoint


def load_finished(run_dir: pathlib.Path) -> Checkpoint:
    """Loads the last checkpoint of a finished training; raises CheckpointError without one."""
    found = find_newest_checkpoint(run_dir)
    if found is None or not is_complete(found.metadata, found.epochs):
        where = found and (found.warning() or found.path)
        raise CheckpointError(
            f"{where or run_dir}: the training is not finished; run the same command again, or use"
            " --overwrite"
        )
    return found


def find_result(
    run_directory: RunDirectory, found: Checkpoint | None, draw: Draw
) -> dict[str, Any] | None:
    """Returns the summary of a finished run; None if there is, or may be, something to train."""
    path, new = run_directory.path, run_directory.config
    old = HEADER | found.metadata.config if found else run_directory.old_config()
    if not old:
        return None
    check_same_run(path, literal_options(old), literal_options(new))
    is_finished = found and is_complete(found.metadata, found.epochs)
    if not found or not is_finished or found.damaged or old != new:
        return None
    run_directory.restore_config()
    write_history(path, found.metadata, found.epochs, draw)
    console.say(f"{path} is already finished; this is its result")
    return summarize(found.metadata, found.epochs)


def check_resumable(
    found: Checkpoint, run_dir: pathlib.Path, metadata: RunMetadata, *, has_schedule: bool
) -> None:
    """Checks that a built training continues that of a checkpoint, and prints where it resumes."""
    old, new = _identity(found.metadata), _identity(metadata)
    # With more epochs, the recipe's learning rate may be another.
    if found.metadata.config["learning_rate"] == metadata.config["learning_rate"]:
        old["learning_rate"] = new["learning_rate"]
    check_same_run(run_dir, old, new)
    if found.warning():
        console.warn(found.warning())
    last = found.epochs[-1]
    where = "at the end of" if last.is_finished else "in"
    console.say(f"resuming after step {last.step}, {where} epoch {last.epoch}")
    if has_schedule and old["epochs"] != new["epochs"]:
        console.warn(
            f"epochs {old['epochs']} → {new['epochs']}: the learning rate follows the schedule of"
            " the new number of epochs; a run from scratch would give another result"
        )


def _identity(metadata: RunMetadata) -> dict[str, Any]:
    """Returns what two attempts of one training have in common, by what the options resolve to."""
    return {
        **literal_options(metadata.config),
        "learning_rate": metadata.learning_rate,
        "all_reduce": metadata.all_reduce,
        "dataset_sha256": metadata.dataset_sha256,
        "devices": ", ".join(metadata.devices),
        **{name: metadata.versions.get(name) for name in ("tensorflow", "keras")},
    }
