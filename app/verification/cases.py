"""Runs `verify --case`: compares a case on several devices with the case on one device."""

import pathlib

from app.devices import device_setup
from app.options import Config
from app.options.names import KERAS_FIT
from app.report.training_result import devices_text
from app.runtime import console
from app.runtime.processes import call_in_child_process
from app.runtime.progress_bar import Progress
from app.verification.frameworks import temporary_folder
from app.verification.output import Results, Run, verify_in_directory
from app.verification.recording import Send


def verify_case(config: Config) -> dict[str, Run]:
    """Verifies a case with each strategy in a separate process, and reports the findings.

    Returns:
        Name of each training → result.

    Raises:
        ConfigError, DataError: the case cannot be verified.
        MismatchError: a stage has a fault.
    """
    case, training = config.verification, config.training
    shared = {"global_batch_size": training.global_batch_size, "seed": training.seed}
    fields = {
        "case": str(case.case_path.resolve()),
        "function": case.case_function,
        "strategy": ",".join(config.distribution.strategies),
        "num_replicas": config.num_devices_of_all_workers,
        **shared,
        "steps": case.steps,
        "thorough": case.thorough,
    }

    def verify(traces: pathlib.Path) -> Results:
        runs = dict[str, Run]()
        # AutoGraph writes files for the functions of a case, which a child process does not remove.
        folder = temporary_folder(traces / "generated")
        with Progress(case.steps) as progress, folder as generated:
            for strategy in config.distribution.strategies:
                progress.start(f"verifying {strategy}: starting TensorFlow")
                run = call_in_child_process(
                    *(_verify_with, config, strategy, traces),
                    on_message=progress.message,
                    environment={"TMPDIR": str(generated.absolute())},
                )
                runs[run.verdict.name] = run
        largest = max(runs.values(), key=lambda run: len(run.devices))
        model = largest.facts["model"]
        devices = devices_text(largest.devices, largest.simulated_devices)
        batch = f"batch {training.global_batch_size}, seed {training.seed}"
        facts = {"case": str(case.case_path), "model": model, **shared}
        return Results(runs, facts, {"model": f"{model}, {batch}, {devices}, TF32 off"})

    return verify_in_directory(config, case.case_path.stem, fields, verify)


def _verify_with(send: Send, config: Config, strategy: str, traces: pathlib.Path) -> Run:
    """Verifies a case with one strategy; runs in a child process."""
    console.forward_warnings(lambda text: send(("warning", text)))
    on_devices = "mirrored" if strategy == KERAS_FIT else strategy
    devices = device_setup.set_up(config.for_training(on_devices, inject=None))
    from app.verification.case_verification import verify_with  # Imports TensorFlow.

    return verify_with(send, config, devices, strategy, traces)
