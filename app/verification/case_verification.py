"""Verifies a case with one strategy: its steps and, with `--thorough`, a resume and an evaluation.

Runs in a child process, because it imports TensorFlow and the case.
"""

import dataclasses
import pathlib
import time
from collections.abc import Sequence

import tensorflow as tf

from app.devices.device_setup import Devices
from app.options import Config
from app.options.names import KERAS_FIT, SINGLE, VERIFIED_STEPS
from app.records.files import io_errors_as
from app.runtime.console import count
from app.runtime.progress_bar import duration_text
from app.runtime.versions import versions
from app.verification.case_data import AFTER_RESUME, CaseData, Part
from app.verification.case_file import CaseFile
from app.verification.case_training import CaseTraining
from app.verification.output import Run
from app.verification.recording import Send
from lockstep.answer.verdict import NOTHING, Finding, Verdict, finding_of, in_sequence

_UNITS_OF_TRAINING = 3  # A traced training takes about the time of as many checked steps.
NAMES = {KERAS_FIT: KERAS_FIT, SINGLE: "fit on one device"}  # Strategy → name of its training.


def verify_with(
    send: Send, config: Config, devices: Devices, strategy: str, traces: pathlib.Path
) -> Run:
    """Trains the steps of a case with one strategy and compares each step with one device.

    Args:
        send: called with progress messages.
        config: names the case.
        devices: the devices to train on.
        strategy: one of `CASE_STRATEGIES`.
        traces: directory for the traces.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    options = config.verification
    work = _Work(send)
    work.begin("building the model")
    case = CaseFile(options.case_path, options.case_function)
    size, is_thorough = config.training.global_batch_size, options.thorough
    data = CaseData(case, size, options.steps, has_second_epoch=is_thorough)
    training = CaseTraining(case, data, config, devices, strategy)
    training.check_possible()
    resumes = is_thorough and not training.splits_itself
    work.total += len(data.steps) + (resumes + is_thorough) * _UNITS_OF_TRAINING
    verdicts: list[Verdict] = []

    def verify(part: Part, found: Sequence[Finding] = ()) -> None:
        steps, on = count(len(part.steps), "step"), count(training.num_replicas, "device")
        work.begin(f"training {steps} on {on}")
        trace = training.record(part, traces / strategy / f"{len(verdicts) + 1}.npz")
        start = time.monotonic()
        verdict = training.check(part, trace, work.begin_step)
        verdicts.append(dataclasses.replace(verdict, findings=(*found, *verdict.findings)))
        work.check_sec += time.monotonic() - start

    with io_errors_as(traces):
        (traces / strategy).mkdir(parents=True)
    verify(data.part(data.steps, is_distributed=training.splits_itself))
    if resumes:
        verify(data.part([AFTER_RESUME]), _not_restored(training.resume()))
    if is_thorough:
        work.begin("evaluating")
        verdicts.append(_evaluate(case, training, verdicts))
    verdict = in_sequence(verdicts)
    notes = () if is_thorough else (_not_checked(data, training, work),)
    return Run(
        dataclasses.replace(
            verdict,
            name=NAMES[strategy],
            reference=f"training that {options.case_path.name} defines on one device",
            notes=(*verdict.notes, *notes),
        ),
        devices=devices.names,
        simulated_devices=devices.simulated and len(devices.names) > 1,
        versions=versions(),
        facts={"model": training.model.name},
    )


class _Work:
    """Tells the parent process what begins, and how much is done.

    Args:
        send: called with `("phase", (what, done, total))`.

    Attributes:
        total: all work, in units of the check of a step.
        check_sec: time of all checks.
    """

    def __init__(self, send: Send):
        self._send, self._start = send, time.monotonic()
        self._done, self.total, self.check_sec = 0, 2 * _UNITS_OF_TRAINING, 0.0

    @property
    def total_sec(self) -> float:
        """The time since the beginning."""
        return time.monotonic() - self._start

    def begin(self, what: str, units: int = _UNITS_OF_TRAINING) -> None:
        """Begins work of a number of units, by default a training, after that begun before."""
        self._send(("phase", (what, self._done, self.total)))
        self._done += units

    def begin_step(self, name: str) -> None:
        """Begins the check of a step."""
        self.begin(f"computing {name} on one device", units=1)


def _not_restored(changed: Sequence[str]) -> list[Finding]:
    """Returns a finding for the variables whose restored values differ from the saved ones."""
    text = f"{len(changed)} variables are not what was saved"
    return [finding_of("start", "not_restored", text, (0,), tensors=changed)] if changed else []


def _evaluate(case: CaseFile, training: CaseTraining, verdicts: Sequence[Verdict]) -> Verdict:
    """Returns the verdict on an evaluation after the steps with these verdicts."""
    findings = case.run(training.evaluate, "in model.evaluate() on one device")
    return dataclasses.replace(
        verdicts[0],
        steps=(0,),
        step_names={0: "an evaluation"},
        findings=tuple(findings),
        checked=("evaluation",),
        measurements=(),
        idle=verdicts[0].idle if all(v.status == NOTHING for v in verdicts) else {},
    )


def _not_checked(data: CaseData, training: CaseTraining, work: _Work) -> str:
    """Says what `--thorough` would check in addition, and about how long all of it would take."""
    num_steps = VERIFIED_STEPS
    if data.num_batches is not None:
        num_steps = min(num_steps, data.num_batches)
    more = [count(num_steps - len(data.steps), "more step")] if num_steps > len(data.steps) else []
    more += ["the second epoch"] if data.num_batches is not None else []
    more += [] if training.splits_itself else ["a save and resume"]
    step_sec = work.check_sec / len(data.steps)
    # A resume and an evaluation build and trace the model again.
    setup_sec = 3 * (work.total_sec - work.check_sec)
    left = duration_text(setup_sec + step_sec * (num_steps + 2))
    return f"not checked: {', '.join(more)} and an evaluation; --thorough takes about {left}"
