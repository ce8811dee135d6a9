"""`evaluate`: computes the test accuracy of a run, on any strategy."""

import pathlib

from app import console
from app.data.fashion_mnist import ImageDataset, load_dataset
from app.devices.setup import set_up
from app.errors import CheckpointError, ConfigError, DataError, OutputError
from app.options import Config
from app.options.rules import MULTI_WORKER
from app.records.checkpoint import Checkpoint, find_newest_checkpoint
from app.records.history import DATASET_CAVEATS, injected_fault_caveat
from app.records.run_directory import load_run_config, named_path

# Options that define the saved state; all others, such as strategy and devices, may differ.
_KEPT = ("model", "recipe", "seed", "precision")


def run(config: Config) -> float:
    """Evaluates a run; returns its accuracy over the whole test set, a fraction."""
    run_dir = named_path(config.arguments.run or "")
    checkpoint = _open_run(run_dir)
    kept = {name: checkpoint.metadata.config[name] for name in _KEPT}
    trained_with = str(checkpoint.metadata.config["strategy"])
    own = "mirrored" if trained_with == MULTI_WORKER else trained_with
    training = config.for_training(config.arguments.strategy or own, **kept)
    devices = set_up(training)
    dataset = _load_dataset(config, run_dir, checkpoint)
    from app.training.build import build_strategy, restore
    from app.training.loop import evaluate

    strategy = build_strategy(training, devices)
    restore(strategy, checkpoint)
    totals = evaluate(strategy, dataset)
    console.say(
        f"{training.training.model} of {run_dir}, step {checkpoint.step}, on"
        f" {dataset.name}: {totals.correct:,} of {totals.examples:,} right, test loss"
        f" {totals.loss:.4f}"
    )
    if dataset.name in DATASET_CAVEATS:
        console.warn(DATASET_CAVEATS[dataset.name])
    console.say(f"test acc: {totals.accuracy:.4f} with {strategy.name} on {strategy.devices}")
    return totals.accuracy


def _open_run(run_dir: pathlib.Path) -> Checkpoint:
    """Returns the newest valid checkpoint of the run that `--run` names."""
    command = load_run_config(run_dir).get("command", "train")
    if command != "train":
        advice = "one of its runs, a directory in it" if command == "compare" else "a training"
        raise OutputError(f"--run={run_dir} is of {command}, and has no weights; give {advice}")
    found = find_newest_checkpoint(run_dir)
    if found is None:
        raise CheckpointError(
            f"{run_dir} has no checkpoint; finish the run with the command that started it"
        )
    if found.warning():
        console.warn(found.warning())
    if fault := found.metadata.config.get("inject"):
        console.warn(injected_fault_caveat(fault))
    return found


def _load_dataset(config: Config, run_dir: pathlib.Path, checkpoint: Checkpoint) -> ImageDataset:
    """Loads the test images of the run; raises DataError if they cannot be found."""
    name = checkpoint.metadata.dataset
    if name == "synthetic" and config.data.data_dir:
        raise ConfigError(
            f"--data_dir={config.data.data_dir} has no effect on a run with generated images;"
            " leave the flag out"
        )
    dataset = load_dataset(name, config.data.data_dir)
    if number := checkpoint.metadata.config.get("num_test_examples"):
        dataset = dataset.with_test_subset(number, checkpoint.metadata.config["seed"])
    if dataset.sha256_of_test_part() != checkpoint.metadata.test_part_sha256:
        raise DataError(
            f"the test images found are not those of {run_dir} (its data set: {name}); give their"
            " folder with --data_dir"
        )
    return dataset
