"""Verifies a case in a child process: records a training and compares it with one device."""

import dataclasses
import pathlib
from collections.abc import Callable

import tensorflow as tf

from app.devices.device_setup import Devices
from app.options import Config
from app.records.files import io_errors_as
from app.runtime.errors import ConfigError
from app.runtime.versions import versions
from app.training.case_file import CaseFile
from app.verification.case_data import CaseData, Part
from app.verification.case_training import CaseTraining
from app.verification.run import Run
from lockstep import trace_file
from lockstep.engine import check
from lockstep.oracles.keras import KerasOracle
from lockstep.trace import Trace
from lockstep.verdict import FAULT, Finding, Verdict, in_sequence

Send = Callable[[tuple], None]


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
    case = CaseFile(config.verification.case_path, config.verification.case_function)
    data = CaseData(case, config.training.global_batch_size, config.verification.steps)
    training = CaseTraining(case, data, config, devices, strategy)
    training.check_possible()
    verdicts: list[Verdict] = []
    for number, part in enumerate(training.parts(), start=1):
        changed = training.resume() if part.resumes else []
        trace = training.record(part)
        if not trace.steps:
            raise ConfigError(
                f"--case={config.verification.case}: fit did not reach {part.names[0]}; return the"
                " same number of batches from data() and distribute()"
            )
        if config.verification.keep_traces:
            path = traces / strategy / f"{number}-{part.place}.npz"
            with io_errors_as(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                trace_file.save(trace, path)
        names = dict(zip(part.wanted, part.names, strict=True))
        verdict = dataclasses.replace(_check(case, training, part, trace), step_names=names)
        if changed:
            found = _not_restored(changed, part.wanted[0])
            verdict = dataclasses.replace(verdict, findings=(found, *verdict.findings))
        verdicts.append(verdict)
        send(("step", sum(len(each.steps) for each in verdicts)))
    findings = case.run(training.evaluate, "in model.evaluate() on one device")
    evaluation = dataclasses.replace(
        verdicts[0],
        steps=(0,),
        step_names={0: "an evaluation"},
        findings=tuple(findings),
        checked=("evaluation",),
        measurements=(),
    )
    verdict = dataclasses.replace(
        in_sequence([*verdicts, evaluation]),
        name=strategy,
        reference=f"training that {config.verification.case_path.name} defines on one device",
    )
    return Run(
        verdict,
        devices=devices.names,
        simulated_devices=devices.simulated and len(devices.names) > 1,
        versions=versions(),
        facts={"model": training.model.name},
    )


def _check(case: CaseFile, training: CaseTraining, part: Part, trace: Trace) -> Verdict:
    def check_trace() -> Verdict:
        oracle = KerasOracle(training.build_unbuilt, trace)
        return check(trace, oracle, batches=part.batches_of(trace))

    return case.run(check_trace, "on one device")


def _not_restored(names: list[str], step: int) -> Finding:
    """Returns the finding about variables that differ from the saved state in the next step."""
    text = f"{len(names)} variables are not what was saved"
    return Finding("start", FAULT, "not_restored", text, (step,), tensors=tuple(names))
