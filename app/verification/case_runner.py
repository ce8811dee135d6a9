"""`verify --case`: is Keras' `fit` on several devices the training that a case defines?"""

import dataclasses
import pathlib
import shutil
from collections.abc import Callable, Sequence

from app.cluster.resource_split import split_resources
from app.cluster.worker_group import WorkerGroup
from app.config import VerifyConfig
from app.config.names import KERAS_FIT, MULTI_WORKER
from app.devices import device_setup
from app.records.files import temporary_path, write_json
from app.records.run_directory import open_log, open_run_directory
from app.records.run_naming import default_out, named_path
from app.runtime import console
from app.runtime.errors import MismatchError
from app.runtime.function_call import Channel
from app.runtime.processes import call_in_child_process
from app.runtime.progress_bar import StepProgress
from app.verification.case_result import EVALUATION, CaseFinding, CaseResult

Send = Callable[[tuple], None]

_MARKS = {"clean": "clean", "by design": "by design", "fault": "✗ fault"}


def verify_case(config: VerifyConfig) -> dict[str, CaseResult]:
    """Verifies a case with each strategy, in a process of its own, and reports what was found.

    Returns:
        Strategy → result.

    Raises:
        ConfigError, DataError: the case is not usable.
        MismatchError: a stage has a fault.
    """
    path = named_path(config.out or default_out("verify", config.case_path.stem))
    fields = {
        "command": "verify",
        "case": str(config.case_path.resolve()),
        "model_fn": config.case_model_fn,
        "data_fn": config.data_fn,
        "distribute_fn": config.distribute_fn,
        "strategy": ",".join(config.strategies),
        "num_replicas": config.num_devices_of_all_workers,
        "global_batch_size": config.global_batch_size,
        "seed": config.seed,
        "steps": config.steps,
        "at": list(config.at),
    }
    with open_run_directory(path, fields) as run_directory:
        open_log(path)
        if not config.overwrite:
            run_directory.check_same_run()
        # What lies in the directory is left as it is until there is something to put in its place.
        traces = temporary_path(path / "traces")
        try:
            results = _verify_each(config, traces)
            run_directory.start(overwrite=config.overwrite)
            run_directory.remove("traces")
            if config.keep_traces:
                traces.rename(path / "traces")
        finally:
            shutil.rmtree(traces, ignore_errors=True)
        _write_record(path, config, results)
    _print(config, results)
    console.say(f"saved in {path}: verify.json")
    for strategy, result in results.items():
        if not result.faults:
            by_design = "another training by design" if result.findings else "the same training"
            console.say(f"{strategy}: {by_design}, no fault found")
    for strategy, result in results.items():
        if result.faults:
            causes = ", ".join(dict.fromkeys(_name(found) for found in result.faults))
            raise MismatchError(
                f"{strategy} is not the training that {config.case_path.name} defines on one"
                f" device: {causes}; see {path}/verify.json"
            )
    return results


def _verify_each(config: VerifyConfig, traces: pathlib.Path) -> dict[str, CaseResult]:
    """Verifies a case with each strategy; leaves recordings in `traces` if they are kept."""
    num_steps = config.steps * ("first" in config.at)
    num_steps += len({*config.at} - {"first", "evaluation"})
    results = {}
    with StepProgress(num_steps) as progress:
        for strategy in config.strategies:
            progress.start(f"verifying {strategy}")
            if strategy == MULTI_WORKER:
                results[strategy] = _verify_on_workers(progress.message, config, traces)
            else:
                results[strategy] = call_in_child_process(
                    _verify_with, config, strategy, traces, on_message=progress.message
                )
    return results


def _verify_on_workers(send: Send, config: VerifyConfig, traces: pathlib.Path) -> CaseResult:
    """Verifies a case with several processes, of which the first compares."""
    training = config.for_training(MULTI_WORKER, inject=None)
    shares = split_resources(config.num_workers, training)
    with WorkerGroup(shares, _verify_as_worker, config, traces) as group:
        while (message := group.receive())[0] == "message":
            send(message[1])
    return message[1][0]


def _verify_as_worker(channel: Channel, config: VerifyConfig, traces: pathlib.Path) -> CaseResult:
    return _verify_with(channel.send, config, MULTI_WORKER, traces)


def _verify_with(
    send: Send, config: VerifyConfig, strategy: str, traces: pathlib.Path
) -> CaseResult:
    """Verifies a case with one strategy; the whole life of a process."""
    console.forward_warnings(lambda text: send(("warning", text)))
    on_devices = "mirrored" if strategy == KERAS_FIT else strategy
    devices = device_setup.set_up(config.for_training(on_devices, inject=None))
    from app.verification.case_check import verify_with  # It imports TensorFlow.

    return verify_with(send, config, devices, strategy, traces)


def _write_record(path: pathlib.Path, config: VerifyConfig, results: dict[str, CaseResult]) -> None:
    record = {
        "command": "verify",
        "case": str(config.case_path),
        "model": next(iter(results.values())).model,
        "global_batch_size": config.global_batch_size,
        "seed": config.seed,
        "strategies": {name: dataclasses.asdict(result) for name, result in results.items()},
    }
    write_json(path / "verify.json", record)


def _print(config: VerifyConfig, results: dict[str, CaseResult]) -> None:
    """Prints every stage of every strategy, and the cause and remedy of each finding."""
    first = next(iter(results.values()))
    num_devices = max(len(result.devices) for result in results.values())
    console.say(
        f"{config.case_path.name}: model {first.model}, batch {config.global_batch_size}, seed"
        f" {config.seed}, on {console.count(num_devices, 'device')}; TF32 off"
    )
    console.say(f"looked at: {', '.join(_shortened(first.steps))}")
    console.say()
    order = max((result.stages for result in results.values()), key=len)
    stages = list(dict.fromkeys([*order, *(s for r in results.values() for s in r.stages)]))
    console.print_table(
        "Each stage of each step against one device, from the same state",
        ["stage", *results],
        [
            [stage, *(_MARKS.get(r.stages.get(stage, ""), "–") for r in results.values())]
            for stage in stages
        ],
    )
    console.say(f"tolerances: {first.tolerance}")
    for strategy, result in results.items():
        for found in result.findings:
            verdict = "FAULT" if found in result.faults else "another training by design, no fault"
            console.say()
            console.say(f"{strategy}, {verdict}: {_name(found)}")
            console.say(f"  where   {found.stage}, {_where(found, result.steps)}")
            console.say(f"  why     {found.text}")
            console.say(f"  remedy  {found.remedy}")


def _where(found: CaseFinding, steps: Sequence[str]) -> str:
    """Returns in which steps, on which replicas and in which variables it was found."""
    everywhere = set(found.steps) >= {step for step in steps if step != EVALUATION}
    parts = ["every step" if everywhere else ", ".join(_shortened(found.steps))]
    if found.replicas:
        parts.append(f"replica {', '.join(map(str, found.replicas))}")
    if found.tensors:
        more = f" and {len(found.tensors) - 3} more" if len(found.tensors) > 3 else ""
        parts.append(", ".join(found.tensors[:3]) + more)
    return "; ".join(parts)


def _shortened(steps: tuple[str, ...] | list[str]) -> list[str]:
    """Puts "step 1", "step 2", … together, where they follow each other."""
    numbers = [int(step.split()[1]) for step in steps if step.startswith("step ")]
    others = [step for step in steps if not step.startswith("step ")]
    if len(numbers) > 2 and numbers == list(range(numbers[0], numbers[-1] + 1)):
        return [f"steps {numbers[0]} to {numbers[-1]}", *others]
    return [*(f"step {number}" for number in numbers), *others]


def _name(found: CaseFinding) -> str:
    return found.cause.replace("_", " ")
