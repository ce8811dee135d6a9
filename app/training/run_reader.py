"""Loads a run from disk, for any strategy and devices."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING

from app.data.dataset import IMAGE_SHAPE, NUM_CLASSES, ImageDataset
from app.data.dataset_loader import load_dataset
from app.devices.device_setup import Devices
from app.options import Config
from app.records.caveats import injected_fault_caveat
from app.records.checkpoint import Checkpoint, find_newest_checkpoint
from app.records.run_directory import load_run_config, named_path
from app.runtime import console
from app.runtime.errors import CheckpointError, ConfigError, DataError, OutputError

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from strategies.base import Strategy

# Options that define the saved state; all others, such as strategy and devices, may differ.
_KEPT = ("model", "recipe", "seed", "precision")


@dataclasses.dataclass(frozen=True)
class SavedRun:
    """A checkpoint with a configuration to rebuild it.

    Attributes:
        config: a training with the devices and strategy of the command, and the run's model.
        checkpoint: the newest valid checkpoint.
        run_dir: the directory of the run.
    """

    config: Config
    checkpoint: Checkpoint
    run_dir: pathlib.Path

    @classmethod
    def open(cls, config: Config) -> "SavedRun":
        """Opens the run that `config.evaluation.run` names.

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
        trained = found.checkpoint.metadata.config
        if trained.get("inject"):
            console.warn(injected_fault_caveat(str(trained["inject"])))
        try:
            kept = {name: trained[name] for name in _KEPT}
            return cls(
                config.for_training(config.distribution.strategy, **kept), found.checkpoint, run_dir
            )
        except (ConfigError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{found.path}: not a training of this program ({error}); choose another run"
            ) from error

    def load_dataset(self) -> ImageDataset:
        """Loads the test images of the run.

        Raises:
            ConfigError: the run has generated images, but real ones were requested.
            DataError: the data is missing, damaged, or not the run's.
        """
        metadata = self.checkpoint.metadata
        name = metadata.dataset
        if name == "synthetic" and self.config.data.data_dir:
            raise ConfigError(
                f"--data_dir={self.config.data.data_dir} has no effect on a run with generated"
                " images;"
                " leave the flag out"
            )
        dataset = load_dataset(
            name,
            data_dir=self.config.data.data_dir,
            allow_unverified=self.config.data.allow_unverified_data,
            warn=console.warn,
        )
        if dataset.sha256_of_test_part() != metadata.test_part_sha256:
            raise DataError(
                f"the test images found are not those of {self.run_dir} (its data set: {name});"
                " give their folder with --data_dir"
            )
        return dataset

    def rebuild(self, devices: Devices) -> "Strategy":
        """Builds the strategy on `devices` and loads the saved state."""
        from app.training.strategy_builder import build_strategy, restore

        # No step is run, so that learning rate and number of steps do not matter.
        strategy = build_strategy(
            self.config,
            devices,
            image_shape=IMAGE_SHAPE,
            num_classes=NUM_CLASSES,
            learning_rate=1.0,
            num_steps=1,
        )
        restore(strategy, self.checkpoint)
        return strategy
