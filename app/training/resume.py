"""Finds the result or the checkpoint of a run, and tells what has changed since."""

import dataclasses
import pathlib

from app.options import Config
from app.records.checkpoint import Checkpoint, find_newest_checkpoint
from app.records.history import HISTORY_FILE, Summary
from app.records.run_directory import RunDirectory, check_same_run
from app.records.run_metadata import Progress, RunMetadata, is_finished, summarize
from app.runtime import console
from app.runtime.errors import CheckpointError
from app.runtime.versions import CPU_KERNELS, KERNELS_CHANGED, NOT_RECORDED
from app.training.run_writer import write_records
from strategies import OPTIONS_OF_SOME

# Settings that may change when a run resumes. All but the number of epochs change how the steps are
# computed, but not the result except for rounding.
ACCEPTED = {
    "epochs",
    *({"strategy", "deterministic", *OPTIONS_OF_SOME} - {"batch_norm", "communication_dtype"}),
    *("python", "tensorflow", "keras", "numpy"),  # These entries hold versions.
}


def find_checkpoint(run_dir: pathlib.Path) -> Checkpoint | None:
    """Finds the checkpoint from which a training resumes; None if nothing was saved.

    Raises:
        CheckpointError: no checkpoint is valid, or there is a history without one.
        OutputError: a checkpoint cannot be read, for a reason that may be temporary.
    """
    found = find_newest_checkpoint(run_dir)
    if found is None and (run_dir / HISTORY_FILE).exists():
        raise CheckpointError(
            f"{run_dir} has a history, but no checkpoint; restore the checkpoints, or use"
            " --overwrite"
        )
    return found


def find_result(
    run_directory: RunDirectory, found: Checkpoint | None, num_devices: int | None = None
) -> Summary | None:
    """Returns the result of a finished run in the directory; None if there is still to train.

    Also None if a default has become a value or the other way round: the training compares values.

    Args:
        run_directory: the directory, opened for the training that is asked for.
        found: its newest checkpoint.
        num_devices: the number of devices that is asked for; None for any.

    Raises:
        CheckpointError: the run in the directory has another configuration.
        DiskFullError, OutputError: a record that is missing cannot be written.
    """
    path, new = run_directory.path, run_directory.config
    old = run_directory.old_config()
    if found:
        old = {**found.metadata.config, "written_by": new["written_by"]}
    if not old:
        return None
    changed = check_same_run(path, old, new, accepted=ACCEPTED)
    if found is None or not is_finished(found.metadata, found.progress):
        return None
    if found.damaged or "epochs" in changed:
        return None
    differing, before = list(changed.values()), len(found.metadata.devices)
    if num_devices not in (None, before):
        differing.append(f"devices {before} → {num_devices}")
    if differing:
        raise CheckpointError(
            f"--out={path} holds a finished run of another configuration ({'; '.join(differing)});"
            " choose another directory, raise --epochs to continue, or use --overwrite"
        )
    if any(old.get(name) != value for name, value in new.items()):  # A default and a value.
        return None
    write_records(path, found.metadata, found.progress)
    console.say(f"{path} is already finished; this is its result")
    return summarize(found.metadata, found.progress)


def resumed_progress(
    found: Checkpoint,
    run_dir: pathlib.Path,
    config: Config,
    metadata: RunMetadata,
    *,
    has_schedule: bool,
) -> Progress:
    """Returns the progress of a checkpoint, with the changes of the configuration.

    Prints the step and the changes.

    Args:
        found: the checkpoint.
        run_dir: the run directory.
        config: options of the resuming training.
        metadata: metadata of the resuming training.
        has_schedule: whether the learning rate depends on the number of epochs.

    Raises:
        CheckpointError: the checkpoint is of another training.
    """
    saved, progress = found.metadata, found.progress
    num_begun = progress.epoch + (progress.epoch_step > 0)
    if num_begun > config.training.epochs:
        raise CheckpointError(
            f"--epochs={config.training.epochs}: epoch {num_begun} has already started; use"
            f" --epochs={num_begun} or more, or another directory"
        )
    changes = check_same_run(
        run_dir,
        saved.identity,
        metadata.identity,
        accepted=ACCEPTED,
        resolved=(saved.resolved, metadata.resolved),
    )
    if warning := found.warning():
        console.warn(warning)
    where = "in" if progress.epoch_step else "at the end of"
    console.say(f"resuming after step {progress.step}, {where} epoch {num_begun}")
    how = [line for name, line in changes.items() if name != "epochs"]
    if saved.num_shards != metadata.num_shards:
        how.append(f"shards of a batch {saved.num_shards} → {metadata.num_shards}")
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
    lines = [*changes.values(), *_changed_kernels(saved, metadata)]
    noted = [f"step {progress.step}: {line}" for line in lines]
    return dataclasses.replace(progress, changes=[*progress.changes, *noted])


def _changed_kernels(old: RunMetadata, new: RunMetadata) -> list[str]:
    """Warns of other kernels, and returns the change; [] without one."""
    before, after = (each.versions.get(CPU_KERNELS, NOT_RECORDED) for each in (old, new))
    if before == after:
        return []
    change = f"{KERNELS_CHANGED}{before} → {after}"
    console.warn(f"{change}; the weights may differ from those of an uninterrupted run by rounding")
    return [change]
