"""Finds the checkpoint from which a run resumes, and the changes of its configuration."""

import dataclasses
import pathlib

from app.options import Config
from app.records.checkpoint import CheckpointSearchResult, find_newest_checkpoint
from app.records.history import HISTORY_FILE
from app.records.run_directory import (
    changed_settings,
    other_settings_error,
    unresolved_settings,
)
from app.records.run_metadata import RunMetadata
from app.runtime import console
from app.runtime.errors import CheckpointError
from app.runtime.versions import CPU_KERNELS, KERNELS_CHANGED, NOT_RECORDED
from strategies import OPTIONS_OF_SOME

# Options that change how the steps are computed, but not the result except for rounding.
_HOW = {
    *({"strategy", "deterministic", *OPTIONS_OF_SOME} - {"batch_norm", "communication_dtype"}),
    *("python", "tensorflow", "keras", "numpy"),  # These entries hold versions.
}


def accepted_changes(run_dir: pathlib.Path, old: dict, new: dict) -> dict[str, str]:
    """Returns the changes of a configuration with which a run resumes: option → "name old → new".

    Args:
        run_dir: the run directory, for the message.
        old: configuration of the run on disk.
        new: configuration of this command.

    Raises:
        CheckpointError: the configurations define different trainings.
    """
    changes = changed_settings(old, new)
    epochs_before = old.get("epochs")
    accepted = set(_HOW)
    if isinstance(epochs_before, int) and epochs_before < new["epochs"]:
        accepted.add("epochs")
    refused = [line for name, line in changes.items() if name not in accepted]
    if refused:
        raise other_settings_error(run_dir, refused)
    return changes


def find_checkpoint(
    run_dir: pathlib.Path, config: Config, metadata: RunMetadata, *, has_schedule: bool
) -> CheckpointSearchResult | None:
    """Finds the checkpoint from which a training resumes; None if nothing was saved.

    Prints the step, and the changes of the configuration, which are added to the progress.

    Args:
        run_dir: the run directory.
        config: options of the resuming training.
        metadata: metadata of the resuming training.
        has_schedule: whether the learning rate depends on the number of epochs.

    Raises:
        CheckpointError: no checkpoint is valid, or the newest is of another training.
    """
    found = find_newest_checkpoint(run_dir)
    if found is None:
        if (run_dir / HISTORY_FILE).exists():
            raise CheckpointError(
                f"{run_dir} has a history, but no checkpoint; restore the checkpoints, or use"
                " --overwrite"
            )
        return None
    saved, progress = found.checkpoint, found.checkpoint.progress
    num_begun = progress.epoch + (progress.epoch_step > 0)
    if num_begun > config.training.epochs:
        raise CheckpointError(
            f"--epochs={config.training.epochs}: epoch {num_begun} has already started; use"
            f" --epochs={num_begun} or more, or another directory"
        )
    changes = accepted_changes(run_dir, *_identities(saved.metadata, metadata))
    if warning := found.warning():
        console.warn(warning)
    where = "in" if progress.epoch_step else "at the end of"
    console.say(f"resuming after step {progress.step}, {where} epoch {num_begun}")
    changes |= _changed_kernels(saved.metadata, metadata)
    how = [line for name, line in changes.items() if name not in ("epochs", CPU_KERNELS)]
    shards_before, shards = saved.metadata.num_shards, metadata.num_shards
    if shards_before != shards:
        how.append(f"shards of a batch {shards_before} → {shards}")
    if how:
        console.say(
            f"{'; '.join(how)}: global batch {metadata.config['global_batch_size']} and learning"
            f" rate {metadata.learning_rate:g} stay, so the training is the same within rounding"
            " and BatchNorm's shards"
        )
    if "epochs" in changes and has_schedule:
        console.warn(
            f"{changes['epochs']}: the learning rate follows the schedule of the new number of"
            " epochs; a run from scratch would give another result"
        )
    noted = [f"step {progress.step}: {line}" for line in changes.values()]
    progress = dataclasses.replace(progress, changes=[*progress.changes, *noted])
    return found._replace(checkpoint=dataclasses.replace(saved, progress=progress))


def _changed_kernels(old: RunMetadata, new: RunMetadata) -> dict[str, str]:
    """Warns of other kernels, and returns the change as `accepted_changes` does; {} without one."""
    before, after = (each.versions.get(CPU_KERNELS, NOT_RECORDED) for each in (old, new))
    if before == after:
        return {}
    change = f"{KERNELS_CHANGED}{before} → {after}"
    console.warn(f"{change}; the weights may differ from those of an uninterrupted run by rounding")
    return {CPU_KERNELS: change}


def _identities(old: RunMetadata, new: RunMetadata) -> tuple[dict, dict]:
    """Returns all that two runs of the same training have in common, with defaults resolved."""
    unresolved = unresolved_settings(old.config, new.config)
    old_identity, new_identity = (
        {**each.config, "dataset_sha256": each.dataset_sha256, **each.versions}
        for each in (old, new)
    )
    if "learning_rate" in unresolved:
        old_identity["learning_rate"] = old.learning_rate
        new_identity["learning_rate"] = new.learning_rate
    if "num_train_examples" in unresolved and old.dataset_sha256 == new.dataset_sha256:
        del old_identity["num_train_examples"], new_identity["num_train_examples"]
    return old_identity, new_identity
