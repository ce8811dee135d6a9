"""Records trainings of a case by Keras' `fit`, on one device and on several."""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from app.devices.device_setup import Devices
from app.options import Config
from app.options.names import KERAS_FIT
from app.runtime.errors import ConfigError
from app.training.case_file import CaseFile
from app.verification.case_phases import CaseData, Phase
from recorders.lockstep_keras import Recorder, Recording
from strategies.tf_private import reset_layer_numbers

States = Sequence[Sequence[np.ndarray]]  # All variables of each replica.


class CaseTraining:
    """Trains a case with Keras' `fit`, without changes, and records the steps.

    Args:
        case: builds the model.
        data: the dataset of the case.
        config: seed and batch size.
        devices: the devices to train on.
        strategy: "keras_fit" for `tf.distribute.MirroredStrategy`, "single" for no strategy.

    Attributes:
        model: the model on the devices.
        num_replicas: number of its replicas.
        splits_itself: whether the case defines a function that distributes its dataset.
    """

    def __init__(
        self, case: CaseFile, data: CaseData, config: Config, devices: Devices, strategy: str
    ):
        self._case, self._data, self._config = case, data, config
        self._strategy = tf.distribute.get_strategy()
        if strategy == KERAS_FIT:
            self._strategy = tf.distribute.MirroredStrategy(devices.names)
        self.num_replicas = self._strategy.num_replicas_in_sync
        self.model = self.build(self._strategy.scope())
        self.splits_itself = self._distributed() is not None

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the model, then those of its optimizer."""
        return [*self.model.variables, *self.model.optimizer.variables]

    def build_unbuilt(self) -> keras.Model:
        """Builds the model with the same initial weights and the same names in each call."""
        reset_layer_numbers()
        keras.utils.set_random_seed(self._config.training.seed)
        return self._case.build_model()

    def build(self, scope: contextlib.AbstractContextManager | None = None) -> keras.Model:
        """Builds model and optimizer with all variables, in a strategy's scope if one is given."""
        with scope or contextlib.nullcontext():
            model = self.build_unbuilt()

            def build() -> None:
                batch = next(iter(self._data.dataset().take(1)))
                x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
                model(keras.tree.map_structure(lambda leaf: leaf[:1], x))
                model.optimizer.build(model.trainable_variables)

            self._case.run(build, "while the model was called on the first example")
        return model

    def check_possible(self) -> None:
        """Checks that Keras can train the model on these devices.

        Raises:
            ConfigError: the optimizer or the batch size is not supported.
        """
        if self._data.first_size % self.num_replicas and not self.splits_itself:
            size = max(1, self._data.first_size // self.num_replicas) * self.num_replicas
            raise ConfigError(
                f"--case={self._config.verification.case}: the first batch has"
                f" {self._data.first_size} examples,"
                f" which {self.num_replicas} replicas do not divide: Keras' fit fails (keras issue"
                f" 19246); use --global_batch_size={size}"
            )
        accumulates = getattr(self.model.optimizer, "gradient_accumulation_steps", None)
        if self.num_replicas > 1 and accumulates:
            raise ConfigError(
                f"--case={self._config.verification.case}:"
                f" gradient_accumulation_steps={accumulates} of the"
                " optimizer fails under MirroredStrategy (keras issue 20582); remove it, or use"
                " --strategies=single"
            )

    def _distributed(self) -> Any:
        """Returns the distributed data of the case; None if Keras distributes the dataset."""
        if self.num_replicas == 1:
            return None
        return self._case.distribute(self._strategy, self._config.training.global_batch_size)

    def record(self, phase: Phase) -> Recording:
        """Records `fit` on the dataset of a phase."""
        try:
            recorder = Recorder(self.model, steps=phase.wanted)
        except ValueError as error:
            raise ConfigError(f"--case={self._config.verification.case}: {error}") from error

        def fit() -> None:
            dataset = phase.dataset or self._distributed()
            with recorder, warnings.catch_warnings():
                # Keras warns that a phase is only a part of the dataset.
                warnings.filterwarnings("ignore", message="Your input ran out of data")
                self.model.fit(dataset, epochs=phase.epochs, verbose=0, shuffle=False)

        self._case.run(fit, "in model.fit()")
        return recorder.recording()

    def resume(self) -> list[str]:
        """Saves all variables as arrays and assigns them to a new model and optimizer.

        Returns:
            The names of variables whose restored values differ from the saved ones.
        """
        saved = [self._copies(variable)[0] for variable in self.variables]
        self.model = self.build(self._strategy.scope())
        with self._strategy.scope():
            for variable, array in zip(self.variables, saved, strict=True):
                variable.assign(tf.cast(array, variable.dtype))
        restored = [self._copies(variable)[0] for variable in self.variables]
        return _differing([variable.path for variable in self.variables], saved, restored)

    def _copies(self, variable: keras.Variable) -> list[np.ndarray]:
        """Returns the value of a variable on each replica."""
        values = self._strategy.experimental_local_results(variable.value)
        arrays = [np.asarray(value) for value in values]
        return arrays * (self.num_replicas // len(arrays))

    def evaluate(self, dataset: tf.data.Dataset) -> tuple[dict[str, float], States]:
        """Returns loss and metrics over a dataset, and the state used to compute them."""
        copies = [self._copies(variable) for variable in self.variables]
        logs = self._case.run(
            lambda: self.model.evaluate(dataset, verbose=0, return_dict=True), "in model.evaluate()"
        )
        return logs, list(zip(*copies, strict=True))


def _differing(
    names: Sequence[str], saved: Sequence[np.ndarray], restored: Sequence[np.ndarray]
) -> list[str]:
    """Returns the names of arrays that are not bitwise identical."""
    arrays = zip(names, saved, restored, strict=True)
    return [name for name, a, b in arrays if np.asarray(a).tobytes() != np.asarray(b).tobytes()]
