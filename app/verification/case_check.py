"""Verifies a case in a child process: records a training and compares it with one device."""

import dataclasses
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from app.devices.device_setup import Devices
from app.options import Config
from app.records.files import io_errors_as
from app.runtime.errors import ConfigError
from app.runtime.versions import versions
from app.training.case_file import CaseFile
from app.verification.case_phases import CaseData, Phase
from app.verification.case_record import EVALUATION
from app.verification.case_result import CaseResult
from app.verification.case_training import CaseTraining
from recorders.keras_comparison import (
    BY_DESIGN,
    CLEAN,
    FAULT,
    STAGES,
    Finding,
    Report,
    compare,
    compare_evaluation,
)
from recorders.lockstep_keras import Recording

Send = Callable[[tuple], None]


def verify_with(
    send: Send, config: Config, devices: Devices, strategy: str, traces: pathlib.Path
) -> CaseResult:
    """Trains the steps of a case with one strategy and compares each step with one device.

    Args:
        send: called with progress messages.
        config: names the case.
        devices: the devices to train on.
        strategy: one of `CASE_STRATEGIES`.
        traces: directory for the traces, if they are kept.
    """
    tf.config.experimental.enable_tensor_float_32_execution(False)
    case = CaseFile(config.verification.case_path, config.verification.case_function)
    data = CaseData(case, config.training.global_batch_size, config.verification.steps)
    training = CaseTraining(case, data, config, devices, strategy)
    check = CaseCheck(case, data, config, training)
    reports: list[tuple[dict[int, str], Report]] = []
    for number, (phase, recording, report) in enumerate(check.phases(), start=1):
        reports.append((dict(zip(phase.wanted, phase.names, strict=True)), report))
        if config.verification.keep_traces:
            folder = traces / strategy
            path = folder / f"{number}-{phase.place}.npz"
            with io_errors_as(path):
                folder.mkdir(parents=True, exist_ok=True)
                recording.save(str(path))
        send(("step", sum(len(names) for names, _ in reports)))
    reports.append(({0: EVALUATION}, check.evaluation()))
    stages: dict[str, str] = {}
    for stage in STAGES:
        found = {report.status(stage) for _, report in reports if stage in report.checked}
        if found:
            stages[stage] = max(found, key=[CLEAN, BY_DESIGN, FAULT].index)
    return CaseResult(
        reference=f"training that {config.verification.case_path.name} defines on one device",
        devices=devices.names,
        simulated_devices=devices.simulated and len(devices.names) > 1,
        steps=[name for names, _ in reports for name in names.values()],
        stages=stages,
        checks=STAGES,
        findings=_merged(reports),
        tolerance=reports[0][1].tolerance,
        model=check.model_name,
        versions=versions(),
    )


class CaseCheck:
    """Compares a training of a case with the same model on one device, phase by phase.

    Args:
        case: builds the model.
        data: the dataset of the case.
        config: seed and batch size.
        training: the training to compare.
    """

    def __init__(self, case: CaseFile, data: CaseData, config: Config, training: CaseTraining):
        self._case, self._data, self._config, self._training = case, data, config, training

    @property
    def model_name(self) -> str:
        """The name of the model."""
        return self._training.model.name

    def phases(self) -> Iterator[tuple[Phase, Recording, Report]]:
        """Yields each phase of the training with its recording and report."""
        training = self._training
        state_bytes = sum(int(v.value.shape.num_elements()) * 4 for v in training.variables)
        per_step = 4 * max(1, state_bytes) * training.num_replicas
        if training.splits_itself:
            phases = self._data.whole_training()
        else:
            phases = self._data.phases(per_step)
        training.check_possible()
        for phase in phases:
            changed = training.resume() if phase.resumes else []
            recording = training.record(phase)
            if not recording.steps:
                raise ConfigError(
                    f"--case={self._config.verification.case}: fit did not reach"
                    f" {phase.names[0]}; return the"
                    " same number of batches from data() and distribute()"
                )
            report = self._report(phase, recording)
            if changed:
                report = dataclasses.replace(
                    report, findings=[_not_restored(changed, phase.wanted[0]), *report.findings]
                )
            yield phase, recording, report

    def _report(self, phase: Phase, recording: Recording) -> Report:
        def check() -> Report:
            batches = phase.batches_of(recording)
            return compare(recording, self._training.build_unbuilt, batches=batches)

        return self._case.run(check, "on one device")

    def evaluation(self) -> Report:
        """Compares loss and metrics of an evaluation with those of one device."""
        dataset = self._data.to_evaluate()
        logs, states = self._training.evaluate(dataset)
        one = self._training.build()
        findings = self._case.run(
            lambda: compare_evaluation(logs, one, states, self._data.to_evaluate()),
            "in model.evaluate() on one device",
        )
        return Report(1, self._training.num_replicas, findings, ["evaluation"], "")


def _not_restored(names: list[str], step: int) -> Finding:
    """Returns the finding about variables that differ from the saved state in the next step."""
    return Finding(
        "start",
        FAULT,
        "not_restored",
        f"{len(names)} variables are not what was saved",
        (step,),
        tensors=tuple(names),
    )


def _merged(reports: list[tuple[dict[int, str], Report]]) -> list[dict[str, Any]]:
    """Merges findings of the same stage and cause over the phases; returns them as plain data.

    Args:
        reports: for each phase, number → name of its steps, and its report.
    """
    merged: dict[tuple[str, str], list[tuple[Finding, list[str]]]] = {}
    for names, report in reports:
        for finding in report.findings:
            steps = [names[step] for step in finding.steps]
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
