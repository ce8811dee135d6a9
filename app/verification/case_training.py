"""Records trainings of a case by Keras' `fit` or by a strategy of this project."""

import abc
import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from app.config import VerifyConfig
from app.devices.device_setup import Devices
from app.runtime.errors import ConfigError
from app.training.case_file import CaseFile
from app.training.case_model_checks import check_case_model
from app.verification.case_phases import CaseData, Phase
from app.verification.case_recorder import CaseRecorder
from recorders.lockstep_keras import Recorder, Recording
from strategies import load_strategy_class
from strategies.keras_objective import KerasObjective
from strategies.tf_private import reset_layer_numbers

States = Sequence[Sequence[np.ndarray]]  # All variables of each replica.


class RecordedTraining(abc.ABC):
    """A training of a case on several devices.

    Args:
        case: builds the model.
        data: the dataset of the case.
        config: seed and batch size.

    Attributes:
        model: the model on the devices.
        num_replicas: number of its replicas.
        splits_itself: whether the case defines a function that distributes its dataset.
        is_compared: whether this process compares the recording; one of several workers does.
    """

    model: keras.Model
    num_replicas: int
    splits_itself = False
    is_compared = True

    def __init__(self, case: CaseFile, data: CaseData, config: VerifyConfig):
        self._case, self._data, self._config = case, data, config

    @property
    def variables(self) -> list[keras.Variable]:
        """The variables of the model, then those of its optimizer."""
        return [*self.model.variables, *self.model.optimizer.variables]

    @abc.abstractmethod
    def check_possible(self) -> None:
        """Checks that the model can be trained in this way.

        Raises:
            ConfigError: the model, the optimizer or the batch size is not supported.
        """

    @abc.abstractmethod
    def record(self, phase: Phase) -> Recording:
        """Trains on the dataset of a phase and returns the recording of its steps to check."""

    @abc.abstractmethod
    def resume(self) -> list[str]:
        """Saves the state and restores it in a new model and optimizer.

        Returns:
            The names of variables whose restored values differ from the saved ones.
        """

    @abc.abstractmethod
    def evaluate(self, dataset: tf.data.Dataset) -> tuple[dict[str, float], States]:
        """Returns loss and metrics over a dataset, and the state used to compute them."""

    def build_unbuilt(self) -> keras.Model:
        """Builds the model with the same initial weights and the same names in each call."""
        reset_layer_numbers()
        keras.utils.set_random_seed(self._config.seed)
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


class FitTraining(RecordedTraining):
    """Trains with Keras' `fit` under `tf.distribute.MirroredStrategy`, without changes."""

    def __init__(self, case: CaseFile, data: CaseData, config: VerifyConfig, devices: Devices):
        super().__init__(case, data, config)
        self._strategy = tf.distribute.MirroredStrategy(devices.names)
        self.num_replicas = self._strategy.num_replicas_in_sync
        self.model = self.build(self._strategy.scope())
        self.splits_itself = self._distributed() is not None

    def check_possible(self) -> None:
        """See the base class."""
        if self._data.first_size % self.num_replicas and not self.splits_itself:
            size = max(1, self._data.first_size // self.num_replicas) * self.num_replicas
            raise ConfigError(
                f"--case={self._config.case}: the first batch has {self._data.first_size} examples,"
                f" which {self.num_replicas} replicas do not divide: Keras' fit fails (keras issue"
                f" 19246); use --global_batch_size={size}"
            )
        accumulates = getattr(self.model.optimizer, "gradient_accumulation_steps", None)
        if self.num_replicas > 1 and accumulates:
            raise ConfigError(
                f"--case={self._config.case}: gradient_accumulation_steps={accumulates} of the"
                " optimizer fails under MirroredStrategy (keras issue 20582); remove it, or use"
                " --strategies=single,manual"
            )

    def _distributed(self) -> Any:
        """Returns the distributed data of the case; None if Keras distributes the dataset."""
        if self.num_replicas == 1:
            return None
        return self._case.distribute(self._strategy, self._config.global_batch_size)

    def record(self, phase: Phase) -> Recording:
        """Records `fit` on the dataset of a phase."""
        try:
            recorder = Recorder(self.model, steps=phase.wanted)
        except ValueError as error:
            raise ConfigError(f"--case={self._config.case}: {error}") from error

        def fit() -> None:
            dataset = phase.dataset or self._distributed()
            with recorder, warnings.catch_warnings():
                # Keras warns that a phase is only a part of the dataset.
                warnings.filterwarnings("ignore", message="Your input ran out of data")
                self.model.fit(dataset, epochs=phase.epochs, verbose=0, shuffle=False)

        self._case.run(fit, "in model.fit()")
        return recorder.recording()

    def resume(self) -> list[str]:
        """Saves all variables as arrays and assigns them to a new model and optimizer."""
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
        """Runs Keras' `evaluate`."""
        copies = [self._copies(variable) for variable in self.variables]
        logs = self._case.run(
            lambda: self.model.evaluate(dataset, verbose=0, return_dict=True), "in model.evaluate()"
        )
        return logs, list(zip(*copies, strict=True))


class StrategyTraining(RecordedTraining):
    """Trains with a strategy of this project, which computes the loss of the whole batch."""

    def __init__(
        self, case: CaseFile, data: CaseData, config: VerifyConfig, devices: Devices, name: str
    ):
        super().__init__(case, data, config)
        self._devices, self._name = devices, name
        self._start()
        self.is_compared = self._strategy.workers.is_chief

    def _start(self) -> None:
        self._objective = KerasObjective(self._data.dataset().element_spec)
        self._strategy = load_strategy_class(self._name)(
            self._devices.names, workers=self._devices.workers, objective=self._objective
        )
        self.num_replicas = self._strategy.num_replicas
        built: list[keras.Model] = []

        def build() -> keras.Model:
            built.append(self.build_unbuilt())
            return built[-1]

        self._case.run(
            lambda: self._strategy.build(build, lambda: built[-1].optimizer),
            "while the model was called on the first example",
        )
        self.model = self._strategy.model
        self._recorder = CaseRecorder(self._strategy, self._objective.element_spec)

    def check_possible(self) -> None:
        """See the base class."""
        check_case_model(self._strategy, self._config.case)

    def record(self, phase: Phase) -> Recording:
        """Records the steps of the strategy."""
        dataset = phase.dataset or self._data.dataset()

        def train() -> Recording:
            iterator = self._strategy.distribute(self._objective.flatten(dataset.repeat()))
            return self._recorder.record(iterator, phase.wanted)

        return self._case.run(train, f"in a step of strategy {self._name}")

    def resume(self) -> list[str]:
        """Saves and loads the state of a checkpoint."""
        state, own = self._strategy.state(), self._strategy.per_shard_statistics()
        self._start()
        self._strategy.load_state(state)
        self._strategy.load_per_shard_statistics(own)
        restored = self._strategy.state()
        return _differing(list(state), list(state.values()), [restored[name] for name in state])

    def evaluate(self, dataset: tf.data.Dataset) -> tuple[dict[str, float], States]:
        """Runs the strategy's evaluation."""
        state = list(self._strategy.state().values())
        flat = self._objective.flatten(dataset)
        totals = self._case.run(
            lambda: self._strategy.evaluate(flat), f"in an evaluation of strategy {self._name}"
        )
        return {"loss": totals.loss, **self._objective.metrics}, [state]


def _differing(
    names: Sequence[str], saved: Sequence[np.ndarray], restored: Sequence[np.ndarray]
) -> list[str]:
    """Returns the names of arrays that are not bitwise identical."""
    arrays = zip(names, saved, restored, strict=True)
    return [name for name, a, b in arrays if np.asarray(a).tobytes() != np.asarray(b).tobytes()]
