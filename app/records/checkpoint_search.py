"""Finds the newest or the best valid checkpoint of a run."""

import os
import pathlib
from typing import NamedTuple

from app.records.checkpoint import Checkpoint, checkpoint_paths, load_checkpoint, load_manifest
from app.records.files import io_errors_as, remove
from app.runtime.errors import CheckpointError, reason_of

# Retries while a running training replaces checkpoints.
_MAX_TRIES = 5


class CheckpointSearchResult(NamedTuple):
    """The checkpoint that a search selected.

    Attributes:
        checkpoint: the verified checkpoint.
        path: its directory.
        damaged: checkpoints that failed verification and were skipped, each with the reason; the
            newest first in a search for the newest.
        kind: "newest", or "best" for that with the highest test accuracy.
    """

    checkpoint: Checkpoint
    path: pathlib.Path
    damaged: list[tuple[pathlib.Path, str]]
    kind: str = "newest"

    def warning(self) -> str | None:
        """Text that names the damaged checkpoints and the selected one; None if none is damaged."""
        if not self.damaged:
            return None
        told = "; ".join(f"{path} ({reason})" for path, reason in self.damaged)
        return f"damaged checkpoint: {told}. {self.path} is used, the {self.kind} that verifies"


def find_newest_checkpoint(run_dir: pathlib.Path) -> CheckpointSearchResult | None:
    """Loads the newest valid checkpoint of a run; None if the run has no checkpoints.

    Raises:
        CheckpointError: the run has checkpoints, but no valid one.
    """
    for _ in range(_MAX_TRIES):
        damaged: list[tuple[pathlib.Path, str]] = []
        for path in reversed(checkpoint_paths(run_dir)):
            try:
                return CheckpointSearchResult(load_checkpoint(path), path, damaged)
            except CheckpointError as error:
                damaged.append((path, reason_of(error.__cause__ or error)))
        if not damaged:
            return None
        if all(os.path.lexists(path) for path, _ in damaged):
            break  # Otherwise a running training has just replaced them.
    path, reason = damaged[0]
    others = f", as all {len(damaged)} here do not" if len(damaged) > 1 else ""
    raise CheckpointError(
        f"{path}: does not verify ({reason}){others}; train in another directory, or use"
        " --overwrite"
    )


def find_best_checkpoint(run_dir: pathlib.Path) -> CheckpointSearchResult | None:
    """Loads the valid checkpoint at the end of an epoch with the highest test accuracy.

    The newest checkpoint if none ends an epoch; None if the run has no checkpoints.

    Raises:
        CheckpointError: the run has checkpoints, but no valid one.
    """
    ranks: dict[pathlib.Path, tuple[float, float]] = {}
    damaged: list[tuple[pathlib.Path, str]] = []
    for path in checkpoint_paths(run_dir):
        try:
            progress = load_manifest(path)[1]
        except Exception as error:
            damaged.append((path, reason_of(error)))
            continue
        if progress.history and not progress.epoch_step:
            ranks[path] = progress.history[-1].rank
    for path in sorted(ranks, key=lambda path: ranks[path], reverse=True):
        try:
            return CheckpointSearchResult(load_checkpoint(path), path, damaged, kind="best")
        except CheckpointError as error:
            damaged.append((path, reason_of(error.__cause__ or error)))
    return find_newest_checkpoint(run_dir)


def quarantine(path: pathlib.Path) -> None:
    """Renames a damaged checkpoint so that no search finds it again."""
    quarantined = path.with_name(f"damaged-{path.name}")
    with io_errors_as(path):
        remove(quarantined)
        path.rename(quarantined)
