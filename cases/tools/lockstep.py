"""The tool `lockstep`: records each training, and compares the recordings.

What it says of a program: a status, where and in which step it first differs, and a name.
"""

import importlib
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import lockstep

training, note = lockstep.record, lockstep.note
RESULTS = "expected.jsonl"


def keep(kind: str, value: Any, *specs: Any) -> Any:
    """Records an array of a JAX step."""
    return importlib.import_module("lockstep.record_jax").keep(kind, value, *specs)


def module(name: str, value: Any) -> Any:
    """Records an output of a part of a JAX model."""
    return importlib.import_module("lockstep.record_jax").module(name, value)


def differs(was: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """Returns whether a program is not judged as before."""
    return was != line


def judge(
    case: Any, names: Sequence[str], runner: Any, folder: pathlib.Path
) -> Iterator[dict[str, Any]]:
    """Yields what the verifier says of each form of a program.

    Args:
        case: the case.
        names: the forms.
        runner: runs trainings.
        folder: an empty folder.
    """
    from cases.runner import CannotRunError, FailedRunError
    from lockstep.running.launch import TrainingError
    from lockstep.running.run import VARIABLE, Settings, verify_trainings

    def run(training: Any, variables: Mapping[str, str], log: Any, limit: float, wait: Any) -> None:
        """Runs a training in place of `lockstep.running.launch.run_training`."""
        options = json.loads(variables[VARIABLE])
        path = options.pop("path")
        if json.loads(training[1])["own_weights"]:
            options["replay"] = None  # The form keeps the state that it starts with.

        def variables_for(file: str) -> dict[str, str]:
            return {"CASES_TOOL": "lockstep", VARIABLE: json.dumps({**options, "path": file})}

        try:
            runner.run(training, path, options, variables_for, limit)
        except FailedRunError as error:
            raise TrainingError(error.text, error.tail, has_ended=True) from None

    settings = Settings(case.head["steps"], timeout_sec=runner.timeout_sec, keep=folder)
    for name in names:
        line: dict[str, Any] = {"variant": f"{case.id}.{name}"}
        try:
            reference, *runs = runner.trainings_of(case, name)
            both = {name: (runs[0], runs[1])} if len(runs) == 2 else {}
            variants = {} if both else {name: runs[0]}
            verdict = verify_trainings(reference, variants, settings, both, run=run)[name]
        except CannotRunError:
            raise
        except Exception as error:  # No verdict: the program, a recorder or the engine failed.
            yield {**line, "status": "refused", "text": f"{type(error).__name__}: {error}"}
            continue
        line["status"] = verdict.status
        if verdict.place and verdict.status != "clean":
            line |= {"node": verdict.place.node, "step": verdict.place.step, "name": verdict.name}
        yield {**line, "text": verdict.reason or "; ".join(verdict.missing)}
