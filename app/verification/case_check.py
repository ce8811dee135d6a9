"""Verifies a case in a child process: records `fit` and compares it with one device."""

import contextlib
import dataclasses
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from app.config import VerifyConfig
from app.config.names import KERAS_FIT
from app.devices.device_setup import Devices
from app.records.case_record import EVALUATION
from app.runtime.errors import ConfigError
from app.runtime.versions import versions
from app.training.case_file import CaseFile
from app.verification.case_phases import CaseData, Phase
from app.verification.case_result import CaseResult
from recorders.lockstep_keras import (
    BY_DESIGN,
    CLEAN,
    FAULT,
    STAGES,
    Finding,
    Recorder,
    Recording,
    Report,
    compare,
    compare_evaluation,
)
from strategies.tf_private import reset_layer_numbers

Send = Callable[[tuple], None]


def verify_with(
    send: Send, config: VerifyConfig, devices: Devices, strategy: str, traces: pathlib.Path
) -> CaseResult:
    """Trains the steps of a case with one strategy and compares each step with one device.

    Args:
        send: receives the progress.
        config: names the case.
        devices: the devices to train on.
        strategy: one of `CASE_STRATEGIES`.
        traces: directory for the recordings, if they are kept.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    case = CaseFile(
        config.case_path,
        model_fn=config.case_model_fn,
        data_fn=config.data_fn,
        distribute_fn=config.distribute_fn,
    )
    data = CaseData(case, config.global_batch_size, config.steps)
    tf_strategy = (
        tf.distribute.MirroredStrategy(devices.names)
        if strategy == KERAS_FIT
        else tf.distribute.get_strategy()
    )
    training = CaseTraining(case, data, tf_strategy, config)
    reports = []
    for number, (phase, report) in enumerate(training.verify(config.at), start=1):
        reports.append((phase.names, report))
        if config.keep_traces:
            folder = traces / strategy
            folder.mkdir(parents=True, exist_ok=True)
            training.recording.save(str(folder / f"{number}-{phase.place}.npz"))
        send(("step", sum(len(names) for names, _ in reports)))
    if "evaluation" in config.at:
        reports.append(([EVALUATION], training.evaluate()))
    stages: dict[str, str] = {}
    for stage in STAGES:
        found = {report.status(stage) for _, report in reports if stage in report.checked}
        if found:
            stages[stage] = max(found, key=[CLEAN, BY_DESIGN, FAULT].index)
    return CaseResult(
        devices=devices.names,
        simulated_devices=devices.simulated and len(devices.names) > 1,
        steps=[name for names, _ in reports for name in names],
        stages=stages,
        checks=STAGES,
        findings=_merged(reports),
        tolerance=reports[0][1].tolerance if reports else "",
        model=training.one.name,
        versions=versions(),
    )


class CaseTraining:
    """The model of a case under a strategy, and the same model on one device.

    Args:
        case: builds both models.
        data: the data set of both models.
        strategy: TensorFlow's strategy.
        config: seed and batch size.

    Attributes:
        one: the model on one device.
        recording: the recording of the last phase.
    """

    def __init__(
        self,
        case: CaseFile,
        data: CaseData,
        strategy: tf.distribute.Strategy,
        config: VerifyConfig,
    ):
        self._case, self._data, self._strategy, self._config = case, data, strategy, config
        self._model, self.one = self._build(strategy.scope()), self._build()
        self.recording = Recording(1)

    def _build(self, scope: contextlib.AbstractContextManager | None = None) -> keras.Model:
        """Builds model and optimizer with all variables, in a strategy's scope if one is given."""
        with scope or contextlib.nullcontext():
            model = self._build_unbuilt()

            def build() -> None:
                batch = next(iter(self._data.dataset().take(1)))
                x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
                model(keras.tree.map_structure(lambda leaf: leaf[:1], x))
                model.optimizer.build(model.trainable_variables)

            self._case.run(build, "while the model was called on the first example")
        return model

    def _build_unbuilt(self) -> keras.Model:
        """Builds the model with the same initial weights and the same names in each call."""
        reset_layer_numbers()
        keras.utils.set_random_seed(self._config.seed)
        return self._case.build_model()

    def verify(self, places: tuple[str, ...]) -> Iterator[tuple[Phase, Report]]:
        """Yields the report of each phase."""
        state = self._variables(self._model)
        state_bytes = sum(int(np.prod(v.shape)) * 4 for v in state)
        per_step = 4 * max(1, state_bytes) * self._strategy.num_replicas_in_sync
        splits_itself = self._distributed() is not None
        self._check_keras_can(splits_itself)
        phases = (
            self._data.phases(places, per_step)
            if not splits_itself
            else self._data.whole_training(places)
        )
        for phase in phases:
            if phase.resumes:
                self._resume()
            yield phase, self._verify_phase(phase)

    def _check_keras_can(self, splits_itself: bool) -> None:
        """Refuses cases that Keras' `fit` does not support under a strategy.

        Raises:
            ConfigError: the first batch or the optimizer is not supported.
        """
        num_replicas = self._strategy.num_replicas_in_sync
        if self._data.first_size % num_replicas and not splits_itself:
            size = max(1, self._data.first_size // num_replicas) * num_replicas
            raise ConfigError(
                f"--case={self._config.case}: the first batch has {self._data.first_size} examples,"
                f" which {num_replicas} replicas do not divide: Keras' fit fails (keras issue"
                f" 19246); use --global_batch_size={size}"
            )
        accumulates = getattr(self._model.optimizer, "gradient_accumulation_steps", None)
        if num_replicas > 1 and accumulates:
            raise ConfigError(
                f"--case={self._config.case}: gradient_accumulation_steps={accumulates} of the"
                " optimizer fails under MirroredStrategy (keras issue 20582); remove it, or use"
                " --strategies=single"
            )

    def _distributed(self) -> Any:
        """Returns the distributed data of the case; None if Keras distributes the data set."""
        if self._strategy.num_replicas_in_sync == 1:
            return None
        return self._case.distribute(self._strategy, self._config.global_batch_size)

    def _verify_phase(self, phase: Phase) -> Report:
        try:
            recorder = Recorder(self._model, steps=phase.wanted)
        except ValueError as error:
            raise ConfigError(f"--case={self._config.case}: {error}") from error

        def fit() -> None:
            dataset = phase.dataset or self._distributed()
            with recorder, warnings.catch_warnings():
                # Each phase is a part of the data set, about which Keras warns.
                warnings.filterwarnings("ignore", message="Your input ran out of data")
                self._model.fit(dataset, epochs=phase.epochs, verbose=0, shuffle=False)

        self._case.run(fit, "in model.fit()")
        self.recording = recorder.recording()
        if not self.recording.steps:
            raise ConfigError(
                f"--case={self._config.case}: fit did not reach {phase.names[0]}; return the same"
                " number of batches from data() and distribute()"
            )

        def check() -> Report:
            batches = phase.batches_of(self.recording)
            return compare(self.recording, self._build_unbuilt, batches=batches)

        return self._case.run(check, "on one device")

    def _resume(self) -> None:
        """Restores the state of all variables, saved as arrays, in a new model and optimizer."""
        saved = [self._copies(variable)[0] for variable in self._variables(self._model)]
        self._model = self._build(self._strategy.scope())
        with self._strategy.scope():
            for variable, array in zip(self._variables(self._model), saved, strict=True):
                variable.assign(tf.cast(array, variable.dtype))

    def _variables(self, model: keras.Model) -> list[keras.Variable]:
        return [*model.variables, *model.optimizer.variables]

    def _copies(self, variable: keras.Variable) -> list[np.ndarray]:
        """Returns the value of a variable on each replica."""
        values = self._strategy.experimental_local_results(variable.value)
        arrays = [np.asarray(value) for value in values]
        return arrays * (self._strategy.num_replicas_in_sync // len(arrays))

    def evaluate(self) -> Report:
        """Compares loss and metrics of `evaluate` with those of one device, from the same state."""
        copies = [self._copies(variable) for variable in self._variables(self._model)]
        states = list(zip(*copies, strict=True))

        def logs() -> dict[str, float]:
            return self._model.evaluate(self._data.to_evaluate(), verbose=0, return_dict=True)

        actual = self._case.run(logs, "in model.evaluate()")
        findings = self._case.run(
            lambda: compare_evaluation(actual, self.one, states, self._data.to_evaluate()),
            "in model.evaluate() on one device",
        )
        return Report(1, self._strategy.num_replicas_in_sync, findings, ["evaluation"], "")


def _merged(reports: list[tuple[list[str], Report]]) -> list[dict[str, Any]]:
    """Merges findings of the same stage and cause over the phases; returns them as plain data."""
    merged: dict[tuple[str, str], list[tuple[Finding, list[str]]]] = {}
    for names, report in reports:
        for finding in report.findings:
            steps = [names[step - 1] for step in finding.steps]
            merged.setdefault((finding.stage, finding.cause), []).append((finding, steps))
    found = []
    for same in merged.values():
        first, findings = same[0][0], [finding for finding, _ in same]
        found.append(
            dataclasses.asdict(first)
            | {
                "remedy": first.remedy,
                "steps": list(dict.fromkeys(step for _, steps in same for step in steps)),
                "replicas": sorted({r for f in findings for r in f.replicas}),
                "tensors": list(dict.fromkeys(t for f in findings for t in f.tensors)),
                "distance": max(f.distance for f in findings),
            }
        )
    order = list(STAGES)
    return sorted(found, key=lambda f: order.index(f["stage"]))
