"""Runs `verify --case`: compares a case on several devices with the case on one device."""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any

from app.devices import device_setup
from app.options import Config
from app.options.names import KERAS_FIT
from app.records.files import publish, temporary_path, write_json
from app.records.run_directory import open_command_directory
from app.records.run_naming import default_out, named_path
from app.report.page import REPORT_FILE, write_report
from app.report.training_result import devices_text
from app.runtime import console
from app.runtime.errors import MismatchError
from app.runtime.processes import call_in_child_process
from app.runtime.progress_bar import StepProgress
from app.verification.case_output import describe_case
from app.verification.case_record import FAULT, verdict
from app.verification.case_result import CaseResult

Send = Callable[[tuple], None]


def verify_case(config: Config) -> dict[str, CaseResult]:
    """Verifies a case with each strategy in a separate process, and reports the findings.

    Returns:
        Strategy → result.

    Raises:
        ConfigError, DataError: the case cannot be verified.
        MismatchError: a stage has a fault.
    """
    path = named_path(
        config.output.out or default_out("verify", config.verification.case_path.stem)
    )
    fields = {
        "command": "verify",
        "case": str(config.verification.case_path.resolve()),
        "function": config.verification.case_function,
        "strategy": ",".join(config.distribution.strategies),
        "num_replicas": config.num_devices_of_all_workers,
        "global_batch_size": config.training.global_batch_size,
        "seed": config.training.seed,
        "steps": config.verification.steps,
    }
    with open_command_directory(path, fields, overwrite=config.output.overwrite) as run_directory:
        # Earlier results stay in the directory until the new ones are complete.
        traces = temporary_path(path / "traces")
        try:
            results = _verify_each(config, traces)
            run_directory.start(overwrite=config.output.overwrite)
            run_directory.remove("traces")
            if config.verification.keep_traces:
                publish(traces, path / "traces")
        finally:
            shutil.rmtree(traces, ignore_errors=True)
        record = _record(config, results)
        report_case(path, record, also="traces" if config.verification.keep_traces else "")
    return results


def _verify_each(config: Config, traces: pathlib.Path) -> dict[str, CaseResult]:
    """Verifies a case with each strategy; writes recordings to `traces` if they are kept."""
    results = {}
    with StepProgress(
        config.verification.steps + 3
    ) as progress:  # Last batch, second epoch, resume.
        for strategy in config.distribution.strategies:
            progress.start(f"verifying {strategy}")
            results[strategy] = call_in_child_process(
                _verify_with, config, strategy, traces, on_message=progress.message
            )
    return results


def _verify_with(send: Send, config: Config, strategy: str, traces: pathlib.Path) -> CaseResult:
    """Verifies a case with one strategy; runs in a child process."""
    console.forward_warnings(lambda text: send(("warning", text)))
    on_devices = "mirrored" if strategy == KERAS_FIT else strategy
    devices = device_setup.set_up(config.for_training(on_devices, inject=None))
    from app.verification.case_check import verify_with  # Imports TensorFlow.

    return verify_with(send, config, devices, strategy, traces)


def _record(config: Config, results: dict[str, CaseResult]) -> dict[str, Any]:
    return {
        "command": "verify",
        "case": str(config.verification.case_path),
        "model": next(iter(results.values())).model,
        "global_batch_size": config.training.global_batch_size,
        "seed": config.training.seed,
        "setup": {"model": _setup(config, results)},
        "comparison": "Each stage of each step, compared with one device that starts from the same"
        " state",
        "strategies": {name: dataclasses.asdict(result) for name, result in results.items()},
    }


def _setup(config: Config, results: Mapping[str, CaseResult]) -> str:
    """Returns a description of the training and its devices."""
    largest = max(results.values(), key=lambda result: len(result.devices))
    devices = devices_text(largest.devices, largest.simulated_devices)
    size, seed = config.training.global_batch_size, config.training.seed
    return f"{largest.model}, batch {size}, seed {seed}, {devices}, TF32 off"


def report_case(path: pathlib.Path, record: Mapping[str, Any], *, also: str = "") -> None:
    """Prints the verdicts and findings, writes `verify.json` and the page.

    Raises:
        MismatchError: a stage has a fault.
    """
    result = describe_case(record)
    write_json(path / "verify.json", {**record, "shown": result.to_record()})
    result.print()
    write_report([path], path / REPORT_FILE)
    more = f", {also}" if also else ""
    console.say()
    console.say(f"saved in {path}: verify.json, {REPORT_FILE}{more}")
    console.say(f"open {path / REPORT_FILE} for the stages, causes and remedies on one page")
    verdicts = [verdict(*each) for each in record["strategies"].items()]
    if faults := [sentence for status, sentence in verdicts if status == FAULT]:
        raise MismatchError(f"{'; '.join(faults)}; see {path / REPORT_FILE}")
