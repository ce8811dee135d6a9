"""`evaluate`: computes the test accuracy of a run, or classifies images, on any strategy."""

from typing import TYPE_CHECKING

import numpy as np

from app.data.dataset import CLASS_NAMES, ImageDataset
from app.data.dataset_loader import load_dataset
from app.data.image_files import load_image_files
from app.devices import device_setup
from app.options import Config
from app.records.caveats import DATASET_CAVEATS, injected_fault_caveat
from app.records.checkpoint import Checkpoint, find_newest_checkpoint
from app.records.run_directory import load_run_config, named_path
from app.runtime import console
from app.runtime.errors import CheckpointError, ConfigError, DataError, OutputError

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from strategies.base import Strategy

# Options that define the saved state; all others, such as strategy and devices, may differ.
_KEPT = ("model", "recipe", "seed", "precision")


def run(config: Config) -> float | np.ndarray:
    """Evaluates a run.

    Returns:
        The accuracy over the whole test set, a fraction; with `--images`, the probabilities
        `(N, num_classes)` of the images.
    """
    training, checkpoint = _open_run(config)
    if config.evaluation.images:
        return _classify(config, training, checkpoint)
    devices = device_setup.set_up(training)
    dataset = _load_dataset(config, checkpoint)
    strategy = _rebuild(training, devices, checkpoint)
    from app.training.evaluation import evaluate

    totals = evaluate(strategy, dataset)
    step = checkpoint.progress.step
    console.say(
        f"{training.training.model} of {config.evaluation.run}, step {step}, on {dataset.name}:"
        f" {totals.correct:,} of {totals.examples:,} right, test loss {totals.loss:.4f}"
    )
    if dataset.name in DATASET_CAVEATS:
        console.warn(DATASET_CAVEATS[dataset.name])
    console.say(f"test acc: {totals.accuracy:.4f} with {strategy.name} on {strategy.devices}")
    return totals.accuracy


def _open_run(config: Config) -> tuple[Config, Checkpoint]:
    """Opens the run that `config.evaluation.run` names.

    Returns:
        A training with the devices and strategy of the command, and the run's model; the newest
        valid checkpoint.

    Raises:
        OutputError: the run does not exist.
        CheckpointError: it has no usable checkpoint.
    """
    run_dir = named_path(config.evaluation.run)
    run_config = load_run_config(run_dir)
    if run_config.get("command") == "verify":
        raise OutputError(
            f"--run={run_dir} is a verification, which has no weights; give the directory of a"
            " training"
        )
    if "," in str(run_config.get("strategy")):
        first = str(run_config["strategy"]).split(",")[0]
        raise OutputError(
            f"--run={run_dir} is a comparison; give one of its runs, for example"
            f" --run={run_dir / first}"
        )
    found = find_newest_checkpoint(run_dir)
    if found is None:
        raise CheckpointError(
            f"{run_dir} has no checkpoint; finish the run with the command that started it"
        )
    if warning := found.warning():
        console.warn(warning)
    trained = found.metadata.config
    if trained.get("inject"):
        console.warn(injected_fault_caveat(str(trained["inject"])))
    try:
        kept = {name: trained[name] for name in _KEPT}
        return config.for_training(config.distribution.strategy, **kept), found
    except (ConfigError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{found.path}: not a training of this program ({error}); choose another run"
        ) from error


def _load_dataset(config: Config, checkpoint: Checkpoint) -> ImageDataset:
    """Loads the test images of the run.

    Raises:
        ConfigError: the run has generated images, but real ones were requested.
        DataError: the data is missing, damaged, or not the run's.
    """
    name = checkpoint.metadata.dataset
    if name == "synthetic" and config.data.data_dir:
        raise ConfigError(
            f"--data_dir={config.data.data_dir} has no effect on a run with generated images;"
            " leave the flag out"
        )
    dataset = load_dataset(config, name)
    if dataset.sha256_of_test_part() != checkpoint.metadata.test_part_sha256:
        raise DataError(
            f"the test images found are not those of {named_path(config.evaluation.run)} (its data"
            f" set: {name}); give their folder with --data_dir"
        )
    return dataset


def _rebuild(training: Config, devices: device_setup.Devices, checkpoint: Checkpoint) -> "Strategy":
    """Builds the strategy on `devices` and loads the saved state."""
    from app.training.strategy_builder import build_strategy, restore

    strategy = build_strategy(training, devices)
    restore(strategy, checkpoint)
    return strategy


def _classify(config: Config, training: Config, checkpoint: Checkpoint) -> np.ndarray:
    """Prints the class and its probability of each image, in the given order."""
    names, images = load_image_files(config.evaluation.images)
    strategy = _rebuild(training, device_setup.set_up(training), checkpoint)
    logits = strategy.predict(images)
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True)
    rows = [
        [name, CLASS_NAMES[np.argmax(p)], f"{np.max(p):.4f}"]
        for name, p in zip(names, probabilities, strict=True)
    ]
    title = f"{training.training.model} of {config.evaluation.run}, {strategy.name} on"
    console.print_table(f"{title} {strategy.devices}", ["image", "class", "probability"], rows)
    return probabilities
