"""Defines the training of a case with a strategy of this program."""

import contextlib
import math
import traceback
from collections.abc import Callable, Iterator

import keras
import tensorflow as tf

from app.config import TrainConfig
from app.devices.device_setup import Devices
from app.records.run_metadata import RunMetadata
from app.runtime import console
from app.runtime.errors import ConfigError, is_out_of_memory
from app.runtime.versions import versions
from app.training.case_dataset import CaseDataset
from app.training.case_errors import comes_from_case, describe_error
from app.training.case_file import CaseFile
from app.training.case_model_checks import check_case_model
from app.training.strategy_builder import create_strategy
from strategies.base import Strategy
from strategies.tf_private import learning_rate_schedule, reset_layer_numbers

# Names of TensorFlow's exceptions for its own failures or lost workers, not for errors of a case.
_NOT_OF_A_CASE = ("UnavailableError", "AbortedError", "DeadlineExceededError", "CancelledError")


class CaseSpec:
    """Specifies a training by the file of a case; see `TrainingDefinition`.

    Args:
        config: the options.
        dataset: the data of the case.

    Attributes:
        steps_per_epoch: batches per epoch.
        num_steps: steps of the whole training.
        learning_rate: learning rate of the optimizer before the first step; NaN before the strategy
            is built.
        has_schedule: False: no schedule of a case depends on --epochs.
    """

    has_schedule = False

    def __init__(self, config: TrainConfig, dataset: CaseDataset):
        self._config, self._dataset = config, dataset
        self.steps_per_epoch = len(dataset.train.sizes)
        self.num_steps = config.epochs * self.steps_per_epoch
        self.learning_rate = math.nan

    def build_strategy(self, devices: Devices) -> Strategy:
        """Builds the strategy with the model and the optimizer of the case on every device.

        Raises:
            ConfigError: the model cannot be built or saved, or the strategy cannot train it.
        """
        case, objective = self._dataset.case, self._dataset.objective
        strategy = create_strategy(self._config, devices, objective=objective)
        built: list[keras.Model] = []

        def build_model() -> keras.Model:
            reset_layer_numbers()
            keras.utils.set_random_seed(self._config.seed)
            built.append(case.build_model())
            return built[-1]

        case.run(
            lambda: strategy.build(build_model, lambda: built[-1].optimizer),
            "while the model was built on its data",
        )
        check_case_model(strategy, self._config.case)
        self.learning_rate = first_learning_rate(strategy.optimizer)
        return strategy

    def create_guard(self, strategy: Strategy, devices: Devices) -> "CaseGuard":
        """Creates the guard that reports errors of the case in one line."""
        return CaseGuard(self._dataset.case)

    def metadata(self, strategy: Strategy) -> RunMetadata:
        """Returns the metadata of every checkpoint of this training."""
        return RunMetadata(
            config=self._config.result_fields(),
            learning_rate=self.learning_rate,
            steps_per_epoch=self.steps_per_epoch,
            dataset=self._dataset.name,
            dataset_sha256=self._dataset.sha256(),
            test_part_sha256=self._dataset.sha256_of_test_part(),
            num_devices=strategy.num_devices,
            num_shards=strategy.num_shards,
            num_copies=strategy.num_copies,
            versions=versions(),
        )

    def batches(self, *, seed: int, start_step: int = 0) -> tf.data.Dataset:
        """Returns the infinite dataset of global batches from `start_step` on.

        Raises:
            ValueError: `seed` is not the seed of the training, which the case uses.
        """
        if seed != self._config.seed:
            raise ValueError(f"the data of a case follow from seed {self._config.seed}, not {seed}")
        return self._dataset.train_batches(start_step=start_step)

    def check_examples(self) -> None:
        """Does nothing: the case provides its batches anew in each epoch."""

    def batch_sizes(self) -> set[int]:
        """Returns the sizes of batches."""
        return set(self._dataset.train.sizes)

    def metrics(self) -> dict[str, float]:
        """Returns the metrics of the model over the last evaluation."""
        return dict(self._dataset.objective.metrics)


class CaseGuard:
    """Reports errors of a case in one line.

    Args:
        case: the case whose code is run.
    """

    def __init__(self, case: CaseFile) -> None:
        self._case = case

    def check(self) -> None:
        """Does nothing: the memory of a step of a case is unknown."""

    @contextlib.contextmanager
    def naming_errors(self, is_within_epoch: Callable[[], bool]) -> Iterator[None]:
        """Converts errors of the case, or of Keras code that it uses, to a one-line error.

        Args:
            is_within_epoch: returns whether steps are being trained, not test data evaluated.

        Raises:
            ConfigError: the case failed.
        """
        with self._case.importable():
            try:
                yield
            except Exception as error:
                if _is_of_tensorflow(error) or not comes_from_case(error, self._case.path):
                    raise
                console.log("".join(traceback.format_exception(error)))
                what = "in a training step" if is_within_epoch() else "in the evaluation"
                raise ConfigError(describe_error(error, self._case.path, what)) from error


def _is_of_tensorflow(error: Exception) -> bool:
    """Returns whether an error is TensorFlow's own: memory ran out, or a worker was lost."""
    is_known = type(error).__name__ in _NOT_OF_A_CASE or "Collective ops" in str(error)
    return is_known or is_out_of_memory(error)


def first_learning_rate(optimizer: keras.optimizers.Optimizer) -> float:
    """Returns the learning rate of the first step."""
    schedule = learning_rate_schedule(optimizer)
    rate = schedule(0) if schedule is not None else optimizer.learning_rate
    return float(keras.ops.convert_to_numpy(rate))
