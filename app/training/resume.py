"""Finds the state from which a run resumes, and the changes of its configuration."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from app.options import Config
from app.options.split_numbers import OPTIONS_OF_SOME
from app.records.checkpoint import Checkpoint, CheckpointSearchResult, find_newest_checkpoint
from app.records.history import HISTORY_FILE
from app.records.run_directory import changed_settings, other_settings_error
from app.records.run_metadata import RunMetadata
from app.runtime import console
from app.runtime.errors import CheckpointError

# Options that change how the steps are computed, but not the result except for rounding.
_HOW = {
    *({"strategy", "deterministic", *OPTIONS_OF_SOME} - {"batch_norm", "communication_dtype"}),
    *("python", "tensorflow", "keras", "numpy"),  # Their versions.
}


class Changes(NamedTuple):
    """Differences from the run to resume, each as "name old → new".

    Attributes:
        how: changes of how steps are computed; accepted and reported.
        more_epochs: a larger number of epochs; accepted and reported.
        serious: option → changes to another training, which are refused.
    """

    how: list[str]
    more_epochs: list[str]
    serious: dict[str, str]

    def check(self, run_dir: pathlib.Path) -> None:
        """Rejects serious changes.

        Raises:
            CheckpointError: there are serious changes.
        """
        if self.serious:
            raise other_settings_error(run_dir, list(self.serious.values()))


def classify_changes(changed: Mapping[str, str], old: dict, new: dict) -> Changes:
    """Classifies the differences between two configurations.

    Args:
        changed: the result of `changed_settings`.
        old, new: the two configurations; the old one may be damaged.
    """
    before, now = old.get("epochs"), new.get("epochs")
    more_epochs = isinstance(before, int) and isinstance(now, int) and before < now
    changes = Changes([], [], {})
    for name, line in changed.items():
        if name in _HOW:
            changes.how.append(line)
        elif name == "epochs" and more_epochs:
            changes.more_epochs.append(line)
        else:
            changes.serious[name] = line
    return changes


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The state from which a training resumes.

    Attributes:
        checkpoint: the state, with the progress from which the training resumes.
        found: the unchanged checkpoint, and damaged newer ones.
        changes: changes of the configuration.
    """

    checkpoint: Checkpoint
    found: CheckpointSearchResult
    changes: Changes

    def report(self, metadata: RunMetadata, *, has_schedule: bool) -> None:
        """Prints the step from which the training resumes, and the changes.

        Args:
            metadata: metadata of the resuming training.
            has_schedule: whether the learning rate depends on the number of epochs.
        """
        progress, changes = self.checkpoint.progress, self.changes
        if warning := self.found.warning():
            console.warn(warning)
        within = f" and {console.count(progress.epoch_step, 'step')}" if progress.epoch_step else ""
        console.say(f"resuming after epoch {progress.epoch}{within}, step {progress.step}")
        before, now = self.found.checkpoint.metadata.num_shards, metadata.num_shards
        how = [*changes.how, *([f"shards of a batch {before} → {now}"] if before != now else [])]
        if how:
            console.say(
                f"{'; '.join(how)}: global batch {metadata.config['global_batch_size']} and"
                f" learning rate {metadata.learning_rate:g} stay, so the training is the same"
                " within rounding and BatchNorm's shards"
            )
        if changes.more_epochs and has_schedule:
            console.warn(
                f"{changes.more_epochs[0]}: the learning rate follows the schedule of the new"
                " number of epochs; a run from scratch would give another result"
            )


def find_state(run_dir: pathlib.Path, config: Config, metadata: RunMetadata) -> Resumed | None:
    """Finds the state from which a training resumes; None if nothing was saved.

    Finds changes without rejecting them; see `Changes.check`.

    Args:
        run_dir: the run directory.
        config: options of the resuming training.
        metadata: metadata of the resuming training.

    Raises:
        CheckpointError: no checkpoint is valid, or it is beyond the requested epochs.
    """
    found = find_newest_checkpoint(run_dir)
    if found is None:
        if (run_dir / HISTORY_FILE).exists():
            raise CheckpointError(
                f"{run_dir} has a history, but no checkpoint; restore the checkpoints, or use"
                " --overwrite"
            )
        return None
    saved = found.checkpoint
    old, new = _identity(saved.metadata), _identity(metadata)
    changes = classify_changes(changed_settings(old, new), old, new)
    begun = saved.progress.epoch + (saved.progress.epoch_step > 0)
    if begun > config.training.epochs:
        raise CheckpointError(
            f"--epochs={config.training.epochs}: epoch {begun} has already started; use"
            f" --epochs={begun}"
            " or more, or another directory"
        )
    noted = [f"step {saved.progress.step}: {line}" for line in [*changes.how, *changes.more_epochs]]
    progress = dataclasses.replace(saved.progress, changes=[*saved.progress.changes, *noted])
    return Resumed(dataclasses.replace(saved, progress=progress), found, changes)


def _identity(metadata: RunMetadata) -> dict:
    return {
        **metadata.config,
        "dataset_sha256": metadata.dataset_sha256,
        **metadata.versions,
    }
