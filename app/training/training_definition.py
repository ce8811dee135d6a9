"""Defines the interface of a training, specified by options or by a case file."""

import contextlib
from collections.abc import Callable
from typing import Protocol

import tensorflow as tf

from app.config import TrainConfig
from app.data.dataset import ImageDataset
from app.devices.device_setup import Devices
from app.records.run_metadata import RunMetadata
from app.training.case_dataset import CaseDataset
from app.training.case_spec import CaseSpec
from app.training.training_data import TrainingData
from app.training.training_spec import TrainingSpec, load_data
from strategies.base import Strategy


class StepGuard(Protocol):
    """Describes errors of a step in one line."""

    def check(self) -> None:
        """Rejects a step that does not fit into memory, if that is known."""

    def naming_errors(
        self, is_within_epoch: Callable[[], bool]
    ) -> contextlib.AbstractContextManager[None]:
        """Converts errors of steps and evaluations to one-line errors."""


class TrainingDefinition(Protocol):
    """The interface of a training's specification; see `TrainingSpec`."""

    steps_per_epoch: int
    num_steps: int
    learning_rate: float

    @property
    def has_schedule(self) -> bool:
        """Whether the learning rate depends on the number of steps of the whole training."""

    def build_strategy(self, devices: Devices) -> Strategy:
        """Builds the strategy with its model and optimizer on every device."""

    def create_guard(self, strategy: Strategy, devices: Devices) -> StepGuard:
        """Creates the guard that checks the memory of a step and describes its errors."""

    def metadata(self, strategy: Strategy) -> RunMetadata:
        """Returns the metadata of every checkpoint of this training."""

    def batches(self, *, seed: int, start_step: int = 0) -> tf.data.Dataset:
        """Returns the infinite dataset of global batches from `start_step` on."""

    def check_examples(self) -> None:
        """Checks that no example in memory has changed, if the examples are kept there."""

    def batch_sizes(self) -> set[int]:
        """Returns the sizes of batches."""

    def metrics(self) -> dict[str, float] | None:
        """Returns the metrics of a case over the last evaluation; None for images."""


def load_training_data(config: TrainConfig) -> TrainingData:
    """Loads the images, or the data of the case, for `config`.

    Raises:
        ConfigError: the file is not a case.
        DataError: data are missing, damaged, or too small.
    """
    return load_data(config) if config.case is None else CaseDataset(config)


def check_shards(config: TrainConfig, num_devices: int, data: TrainingData) -> None:
    """Checks that no shard of a batch is empty.

    Raises:
        ConfigError: a shard would be empty, or an epoch would have no step.
    """
    if isinstance(data, CaseDataset):
        data.check_shards(num_devices)
    else:
        config.check_shards(num_devices, data.num_train_examples)


def define_training(config: TrainConfig, data: TrainingData) -> TrainingDefinition:
    """Returns the specification of the training.

    Raises:
        TypeError: the data are neither images nor those of a case.
    """
    if isinstance(data, CaseDataset):
        return CaseSpec(config, data)
    if isinstance(data, ImageDataset):
        return TrainingSpec(config, data)
    raise TypeError(f"{type(data).__name__} is no data of a training")
