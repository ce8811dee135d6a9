"""Verifies a case: records trainings by Keras' `fit`, and compares each step with one device.

Runs in a child process, because it imports TensorFlow and the case.
"""

import contextlib
import dataclasses
import functools
import pathlib
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from app.devices.device_setup import Devices
from app.options import Config
from app.options.names import KERAS_FIT, SINGLE, VERIFIED_STEPS
from app.records.files import io_errors_as
from app.runtime.console import count
from app.runtime.errors import ConfigError
from app.runtime.progress_bar import duration_text
from app.runtime.versions import versions
from app.verification.case_data import AFTER_RESUME, CaseData, Part
from app.verification.case_file import CaseFile
from app.verification.output import Run
from app.verification.recording import Send
from lockstep.answer.verdict import NOTHING, Finding, Verdict, finding_of, in_sequence
from lockstep.data import file as trace_file
from lockstep.data.trace import Trace
from lockstep.numeric.arrays import same_bits
from lockstep.oracles.keras import KerasOracle
from lockstep.record_keras import Recorder, is_float, leaves
from lockstep.run import check
from lockstep.stages.evaluation import check_evaluation
from strategies.tf_private import reset_layer_numbers

State = Sequence[np.ndarray]  # All variables of a replica.
NAMES = {KERAS_FIT: KERAS_FIT, SINGLE: "fit on one device"}  # Strategy → name of its training.

_UNITS_OF_TRAINING = 3  # A traced training takes about the time of as many checked steps.


def verify_with(
    send: Send, config: Config, devices: Devices, strategy: str, traces: pathlib.Path
) -> Run:
    """Trains the steps of a case with one strategy and compares each step with one device.

    Args:
        send: called with progress messages.
        config: names the case.
        devices: the devices to train on.
        strategy: one of `CASE_STRATEGIES`.
        traces: directory for the traces, if they are kept.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    options = config.verification
    case = CaseFile(options.case_path, options.case_function)
    work = Work(send)
    work.begin("building the model")
    data = CaseData(
        case, config.training.global_batch_size, options.steps, has_second_epoch=options.thorough
    )
    training = CaseTraining(case, data, config, devices, strategy)
    training.check_possible()
    work.done += _UNITS_OF_TRAINING
    resumes = options.thorough and not training.splits_itself
    work.total += len(data.steps) + (resumes + options.thorough) * _UNITS_OF_TRAINING
    verdicts: list[Verdict] = []

    def verify(part: Part) -> None:
        work.begin(f"training {count(len(part.steps), 'step')} on {training.devices_text}")
        trace = training.record(part)
        work.done += _UNITS_OF_TRAINING
        if config.verification.keep_traces:
            path = traces / strategy / f"{len(verdicts) + 1}.npz"
            with io_errors_as(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                trace_file.save(trace, path)
        with work.timed():
            verdicts.append(training.check(part, trace, work))

    for part in training.parts():
        verify(part)
    if resumes:
        changed = training.resume()
        verify(data.part([AFTER_RESUME]))
        if changed:
            text = f"{len(changed)} variables are not what was saved"
            first = finding_of("start", "not_restored", text, (0,), tensors=changed)
            findings = first, *verdicts[-1].findings
            verdicts[-1] = dataclasses.replace(verdicts[-1], findings=findings)
    if options.thorough:
        work.begin("evaluating")
        evaluation = case.run(training.evaluate, "in model.evaluate() on one device")
        verdicts.append(
            dataclasses.replace(
                verdicts[0],
                steps=(0,),
                step_names={0: "an evaluation"},
                findings=tuple(evaluation),
                checked=("evaluation",),
                measurements=(),
                idle=verdicts[0].idle if all(v.status == NOTHING for v in verdicts) else {},
            )
        )
    verdict = in_sequence(verdicts)
    if not options.thorough:
        note = _not_checked(data, training, work)
        verdict = dataclasses.replace(verdict, notes=(*verdict.notes, note))
    verdict = dataclasses.replace(
        verdict,
        name=NAMES[strategy],
        reference=f"training that {config.verification.case_path.name} defines on one device",
    )
    return Run(
        verdict,
        devices=devices.names,
        simulated_devices=devices.simulated and len(devices.names) > 1,
        versions=versions(),
        facts={"model": training.model.name},
    )


class Work:
    """Tells the parent process what is done, and how much is left.

    Args:
        send: called with `("phase", (what, done, total))`.

    Attributes:
        done, total: work in units of the check of a step.
        checked_sec: time of all checks.
    """

    def __init__(self, send: Send):
        self._send, self._start = send, time.monotonic()
        self.done, self.total, self.checked_sec = 0, 2 * _UNITS_OF_TRAINING, 0.0

    def begin(self, what: str) -> None:
        """Begins a phase; work that is done since the last one is to be added to `done` first."""
        self._send(("phase", (what, self.done, self.total)))

    @contextlib.contextmanager
    def timed(self) -> Iterator[None]:
        """Adds the time of a `with` block to that of checks."""
        start = time.monotonic()
        yield
        self.checked_sec += time.monotonic() - start

    @property
    def total_sec(self) -> float:
        """The time since the beginning."""
        return time.monotonic() - self._start


def _not_checked(data: CaseData, training: "CaseTraining", work: Work) -> str:
    """Says what `--thorough` would check in addition, and about how long all of it would take."""
    num_steps = VERIFIED_STEPS
    if data.num_batches is not None:
        num_steps = min(num_steps, data.num_batches)
    more = [count(num_steps - len(data.steps), "more step")] if num_steps > len(data.steps) else []
    more += ["the second epoch"] if data.num_batches is not None else []
    more += [] if training.splits_itself else ["a save and resume"]
    step_sec = work.checked_sec / len(data.steps)
    # A resume and an evaluation build and trace the model again.
    setup_sec = 3 * (work.total_sec - work.checked_sec)
    left = duration_text(setup_sec + step_sec * (num_steps + 2))
    return f"not checked: {', '.join(more)} and an evaluation; --thorough takes about {left}"


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
    def devices_text(self) -> str:
        """The number of devices, as in "2 devices"."""
        return count(self.num_replicas, "device")

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

    def parts(self) -> Iterable[Part]:
        """Returns the parts of the training to verify, before a resume."""
        if self.splits_itself:
            return [self._data.part(self._data.steps, is_distributed=True)]
        state_bytes = sum(int(v.value.shape.num_elements()) * 4 for v in self.variables)
        return self._data.parts(4 * max(1, state_bytes) * self.num_replicas)

    def record(self, part: Part) -> Trace:
        """Records `fit` on the dataset of a part."""
        try:
            recorder = Recorder(self.model, steps=part.wanted)
        except ValueError as error:
            raise ConfigError(f"{self._flag}: {error}") from error

        def fit() -> None:
            options = {"epochs": part.num_epochs, "verbose": 0, "shuffle": False}
            options |= self._case.fit_arguments()
            if self._data.num_batches is None:
                options["steps_per_epoch"] = len(part.steps)
            with recorder, _no_warning_of_the_end():
                self.model.fit(part.dataset or self._distributed(), **options)

        self._case.run(fit, "in model.fit()")
        trace = trace_file.from_parts(recorder.about, recorder.arrays)
        if not trace.steps:
            raise ConfigError(
                f"{self._flag}: fit did not reach {part.steps[0].name}; return the same number of"
                " batches from data() and distribute()"
            )
        return trace

    def check(self, part: Part, trace: Trace, work: Work) -> Verdict:
        """Compares each step of a part with one device."""

        def begin(step: int) -> None:
            work.begin(f"computing {part.steps[step].name} on one device")

        def end(step: int) -> None:
            work.done += 1
            if step < len(trace.steps):
                begin(step)

        def check_trace() -> Verdict:
            begin(0)
            oracle = KerasOracle(self.build_unbuilt, trace)
            return check(trace, oracle, batches=part.batches_of(trace), on_step=end)

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
    with _no_warning_of_the_end():
        return model.evaluate(batches, verbose=0, return_dict=True)


@contextlib.contextmanager
def _no_warning_of_the_end() -> Iterator[None]:
    """Hides Keras' warning at the end of a part of a dataset."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Your input ran out of data")
        yield


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
        rows = slice(replica * size, (replica + 1) * size)
        cut = keras.tree.map_structure(lambda leaf: leaf[rows], batch)
        return cut if len(cut) > 1 else cut[0]

    parts = [dataset.map(functools.partial(part, replica)) for replica in range(num_replicas)]
    return [shard.filter(lambda *batch: tf.shape(leaves(batch)[0])[0] > 0) for shard in parts]
