"""Records trainings of a case by Keras' `fit`, on one device and on several."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from app.devices.device_setup import Devices
from app.options import Config
from app.options.names import KERAS_FIT
from app.runtime.errors import ConfigError
from app.training.case_file import CaseFile
from app.verification.case_data import CaseData, Part
from lockstep.arithmetic import same_bits
from lockstep.checks.evaluation import check_evaluation
from lockstep.record_keras import Recorder, is_float, leaves
from lockstep.trace import Trace
from lockstep.trace_file import from_parts
from lockstep.verdict import Finding
from strategies.tf_private import reset_layer_numbers

State = Sequence[np.ndarray]  # All variables of a replica.


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

    def parts(self) -> list[Part]:
        """Returns the parts of the training to verify."""
        if self.splits_itself:
            return self._data.whole_training()
        state_bytes = sum(int(v.value.shape.num_elements()) * 4 for v in self.variables)
        return self._data.parts(4 * max(1, state_bytes) * self.num_replicas)

    def record(self, part: Part) -> Trace:
        """Records `fit` on the dataset of a part."""
        try:
            recorder = Recorder(self.model, steps=part.wanted)
        except ValueError as error:
            raise ConfigError(f"--case={self._config.verification.case}: {error}") from error

        def fit() -> None:
            dataset = part.dataset or self._distributed()
            with recorder, warnings.catch_warnings():
                # Keras warns that this is only a part of the dataset.
                warnings.filterwarnings("ignore", message="Your input ran out of data")
                self.model.fit(dataset, epochs=part.epochs, verbose=0, shuffle=False)

        self._case.run(fit, "in model.fit()")
        return from_parts(recorder.about, recorder.arrays)

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

    def evaluate(self) -> list[Finding]:
        """Compares loss and metrics of an evaluation with those of one device."""
        copies = [self._copies(variable) for variable in self.variables]
        states = list(zip(*copies, strict=True))
        dataset = self._data.to_evaluate()
        logs = self._case.run(
            lambda: self.model.evaluate(dataset, verbose=0, return_dict=True), "in model.evaluate()"
        )
        one = self.build()
        return compare_evaluation(logs, one, states, self._data.to_evaluate())


def compare_evaluation(
    logs: Mapping[str, Any], model: keras.Model, states: Sequence[State], dataset: tf.data.Dataset
) -> list[Finding]:
    """Compares loss and metrics of `evaluate` under a strategy with those of one device.

    Args:
        logs: result of `model.evaluate(..., return_dict=True)` under the strategy.
        model: the model compiled by the same code, outside of the strategy's scope.
        states: variables of the model, then of its optimizer, for each replica, in the evaluation.
        dataset: the batches of the evaluation, each example once.
    """
    expected = _numbers(_evaluate(model, states[0], dataset))
    drawn = [
        variable.path
        for variable, array in zip(model.variables, states[0], strict=False)
        if not is_float(variable) and not same_bits(np.asarray(variable), array)
    ]

    def loss_of_local_states() -> float:
        """Returns the loss of a dataset whose shards are evaluated with the replicas' states."""
        shards = _shards_of(dataset, len(states))
        sizes = [sum(len(leaves(batch)[0]) for batch in shard) for shard in shards]
        losses = [
            _evaluate(model, state, shard)["loss"] if size else 0.0
            for state, shard, size in zip(states, shards, sizes, strict=True)
        ]
        return float(np.average(losses, weights=sizes))

    differ = not all(map(same_bits, states[0], states[-1]))
    local = loss_of_local_states if differ else None
    return check_evaluation(_numbers(logs), expected, drawn=drawn, loss_of_local_states=local)


def _evaluate(model: keras.Model, state: State, batches: tf.data.Dataset) -> dict[str, Any]:
    """Evaluates a model from a state."""
    variables = [*model.variables, *model.optimizer.variables]
    for variable, array in zip(variables, state, strict=True):
        variable.assign(tf.cast(array, variable.dtype))
    with warnings.catch_warnings():
        # Keras warns at the end of a dataset of unknown size, such as a shard.
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        return model.evaluate(batches, verbose=0, return_dict=True)


def _numbers(logs: Mapping[str, Any]) -> dict[str, float]:
    """Returns all numbers in logs; a metric with several numbers has one entry for each."""
    found: dict[str, float] = {}
    for name, value in logs.items():
        numbers = np.ravel(value)
        names = [name] if len(numbers) == 1 else [f"{name}[{i}]" for i in range(len(numbers))]
        found |= dict(zip(names, map(float, numbers), strict=True))
    return found


def _shards_of(dataset: tf.data.Dataset, num_replicas: int) -> list[tf.data.Dataset]:
    """Splits each batch into one part per replica, as `MirroredStrategy` does."""

    def part(replica: int, *batch: Any) -> Any:
        size = -(-tf.shape(leaves(batch)[0])[0] // num_replicas)
        cut = keras.tree.map_structure(
            lambda leaf: leaf[replica * size : (replica + 1) * size], batch
        )
        return cut if len(cut) > 1 else cut[0]

    parts = [dataset.map(partial(part, replica)) for replica in range(num_replicas)]
    return [shard.filter(lambda *batch: tf.shape(leaves(batch)[0])[0] > 0) for shard in parts]


def _differing(
    names: Sequence[str], saved: Sequence[np.ndarray], restored: Sequence[np.ndarray]
) -> list[str]:
    """Returns the names of arrays that are not bitwise identical."""
    arrays = zip(names, saved, restored, strict=True)
    return [name for name, a, b in arrays if np.asarray(a).tobytes() != np.asarray(b).tobytes()]
