"""Trains a case by Keras' `fit`, records its steps, and compares each with one device."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from app.devices.device_setup import Devices
from app.options import Config
from app.options.names import KERAS_FIT
from app.records.files import write_error
from app.runtime.errors import ConfigError
from app.verification.case_data import CaseData, Part
from app.verification.case_evaluation import compare_evaluation, no_warning_of_the_end
from app.verification.case_file import CaseFile
from lockstep.answer.verdict import Finding, Verdict
from lockstep.data import file as trace_file
from lockstep.data.trace import Trace
from lockstep.numeric.arrays import same_bits
from lockstep.oracles.keras import KerasOracle
from lockstep.record_keras import Recorder
from lockstep.run import check
from strategies.tf_private import reset_layer_numbers


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
        self._flag = f"--case={config.verification.case}"
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
        size, num_replicas = self._data.first_size, self.num_replicas
        if size % num_replicas and not self.splits_itself:
            raise ConfigError(
                f"{self._flag}: the first batch has {size} examples, which {num_replicas} replicas"
                " do not divide: Keras' fit fails (keras issue 19246); use"
                f" --global_batch_size={max(1, size // num_replicas) * num_replicas}"
            )
        accumulates = getattr(self.model.optimizer, "gradient_accumulation_steps", None)
        if num_replicas > 1 and accumulates:
            raise ConfigError(
                f"{self._flag}: gradient_accumulation_steps={accumulates} of the optimizer fails"
                " under MirroredStrategy (keras issue 20582); remove it, or use"
                " --strategies=single"
            )

    def _distributed(self) -> Any:
        """Returns the distributed data of the case; None if Keras distributes the dataset."""
        if self.num_replicas == 1:
            return None
        return self._case.distribute(self._strategy, self._config.training.global_batch_size)

    def record(self, part: Part, path: pathlib.Path) -> Trace:
        """Records `fit` on the dataset of a part, in a file, with memory for one step.

        Raises:
            ConfigError: the training cannot be recorded, or does not reach the steps.
            DiskFullError, OutputError: the file cannot be written.
        """
        try:
            recorder = Recorder(self.model, steps=part.wanted)
        except ValueError as error:
            raise ConfigError(f"{self._flag}: {error}") from error
        recorder.path = str(path)

        def fit() -> None:
            options = {"epochs": part.num_epochs, "verbose": 0, "shuffle": False}
            options |= self._case.fit_arguments()
            if self._data.num_batches is None:
                options["steps_per_epoch"] = len(part.steps)
            with recorder, no_warning_of_the_end():
                self.model.fit(part.dataset or self._distributed(), **options)

        self._case.run(fit, "in model.fit()")
        if not recorder.about["steps"]:
            raise ConfigError(
                f"{self._flag}: fit did not reach {part.steps[0].name}; return the same number of"
                " batches from data() and distribute()"
            )
        if recorder.output_error:
            raise write_error(path, recorder.output_error)
        return trace_file.load(path)

    def check(self, part: Part, trace: Trace, begin_step: Callable[[str], None]) -> Verdict:
        """Compares each step of a part with one device.

        Args:
            part: the steps.
            trace: their recording.
            begin_step: called before each step, with its name.
        """

        def begin_next(num_checked: int) -> None:
            if num_checked < len(trace.steps):
                begin_step(part.steps[num_checked].name)

        def check_trace() -> Verdict:
            begin_next(0)
            oracle = KerasOracle(self.build_unbuilt, trace)
            return check(trace, oracle, batches=part.batches_of(trace), on_step=begin_next)

        names = {number: step.name for number, step in zip(part.wanted, part.steps, strict=True)}
        verdict = self._case.run(check_trace, "on one device")
        return dataclasses.replace(verdict, step_names=names)

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
        pairs = zip(self.variables, saved, strict=True)
        return [v.path for v, array in pairs if not same_bits(self._copies(v)[0], array)]

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
