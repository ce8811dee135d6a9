"""Finds the state from which a run resumes, and the changes of its configuration."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import NamedTuple

from app.config import TrainConfig
from app.config.option import options_of
from app.config.split_options import SplitOptions, recorded_value
from app.records.checkpoint import Checkpoint
from app.records.checkpoint_search import CheckpointSearchResult, find_newest_checkpoint
from app.records.history import HISTORY_FILE
from app.records.run_directory import shown_setting
from app.records.run_log_reader import last_saved_step
from app.records.run_metadata import Progress, RunMetadata
from app.runtime import console
from app.runtime.errors import CheckpointError

# Options that change how the steps are computed, but not the result except for rounding.
_HOW = {
    *("strategy", "all_reduce", "bucket_mib", "deterministic", "jit_compile"),
    *(each.name for each in options_of(SplitOptions)),
    *("python", "tensorflow", "keras", "numpy"),  # Their versions.
}
# Options that determine the order of the examples, and the position in it.
_ORDER = {"seed", "global_batch_size", "last_batch", "num_train_examples", "dataset_sha256"}


class Changes(NamedTuple):
    """Differences from the run to resume, each as "name old → new".

    Attributes:
        how: changes of how steps are computed; accepted and reported.
        more_epochs: a larger number of epochs; accepted and reported.
        serious: changes to another training; accepted only with `--force_resume`.
        names: names of everything that differs.
    """

    how: list[str]
    more_epochs: list[str]
    serious: list[str]
    names: set[str]

    @property
    def keep_order(self) -> bool:
        """Whether the order of the examples is unchanged."""
        return not self.names & _ORDER

    def check(self, run_dir: pathlib.Path, *, force: bool) -> None:
        """Rejects serious changes, unless `force` is set.

        Raises:
            CheckpointError: there are serious changes.
        """
        if self.serious and not force:
            raise CheckpointError(
                f"--out={run_dir} contains a run with other settings ({'; '.join(self.serious)});"
                " choose another directory, --force_resume to resume with the new values, or"
                " --overwrite to start from scratch"
            )


def find_changes(old: dict, new: dict, used: Mapping[str, object] | None = None) -> Changes:
    """Compares the configuration of a run with the current one, both as plain values.

    Args:
        old, new: the two configurations.
        used: option → value that the run chose for it, if its configuration has none.
    """
    changes = Changes([], [], [], set())
    for name in {**old, **new}:
        before, now = recorded_value(old, name), new.get(name)
        if before == now:
            continue
        changes.names.add(name)
        chosen = used.get(name) if used else None
        line = f"{name} {shown_setting(before, chosen)} → {shown_setting(now)}"
        if name == "case_sha256" and before and now:
            file = pathlib.Path(new["case"]).name
            line = f"{file} has changed, SHA-256 {shown_setting(before)} → {shown_setting(now)}"
        if name in _HOW:
            changes.how.append(line)
        elif name == "epochs" and isinstance(before, int) and now is not None and before < now:
            changes.more_epochs.append(line)
        else:
            changes.serious.append(line)
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
        if changes.serious:
            console.warn(
                f"--force_resume: from here on it is another training: {'; '.join(changes.serious)}"
            )
            if progress.epoch_step < self.found.checkpoint.progress.epoch_step:
                console.warn(
                    f"epoch {progress.epoch + 1} starts again with the examples of the new settings"
                )
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


def find_state(run_dir: pathlib.Path, config: TrainConfig, metadata: RunMetadata) -> Resumed | None:
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
        has_history = (run_dir / HISTORY_FILE).exists()
        if has_history or (saved_step := last_saved_step(run_dir)):
            what = "a history" if has_history else f"a log of the checkpoint of step {saved_step}"
            raise CheckpointError(
                f"{run_dir} has {what}, but no checkpoint; restore the checkpoints, or use"
                " --overwrite"
            )
        return None
    saved = found.checkpoint
    changes = find_changes(_identity(saved.metadata), _identity(metadata))
    begun = saved.progress.epoch + (saved.progress.epoch_step > 0)
    if begun > config.epochs:
        raise CheckpointError(
            f"--epochs={config.epochs}: epoch {begun} has already started; use --epochs={begun}"
            " or more, or another directory"
        )
    progress = _with_changes(saved.progress, changes)
    return Resumed(dataclasses.replace(saved, progress=progress), found, changes)


def _identity(metadata: RunMetadata) -> dict:
    return {
        **metadata.config,
        "dataset_sha256": metadata.dataset_sha256,
        **metadata.versions,
    }


def _with_changes(progress: Progress, changes: Changes) -> Progress:
    """Returns the progress with a record of the changes."""
    lines = [*changes.how, *changes.more_epochs, *changes.serious]
    noted = [*progress.changes, *(f"step {progress.step}: {line}" for line in lines)]
    if changes.keep_order:
        return dataclasses.replace(progress, changes=noted)
    return Progress(  # The current epoch starts again.
        step=progress.step, total_sec=progress.total_sec, history=progress.history, changes=noted
    )
