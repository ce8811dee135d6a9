"""Asserts in a test that several ways to run a training are the same training.

    def test_two_processes_train_like_one():
        lockstep.assert_same_training(
            "python train.py", {"ddp": "torchrun --nproc_per_node=2 train.py"}
        )

`python -m lockstep run` does the same from a terminal. In the script, the training steps are in
`with lockstep.record(model, optimizer):`. The training runs to its end: give it few steps. Where
layers such as BatchNorm or dropout compute for each replica, a reference in PyTorch is run again,
once for each replica's part of the batch.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence

from lockstep.answer.json import record_of_all
from lockstep.answer.text import describe
from lockstep.data.file import Path
from lockstep.engine.verdict import Verdict
from lockstep.running.launch import Training, TrainingError
from lockstep.running.run import Settings, verify_trainings


def assert_same_training(
    reference: Training,
    variants: Mapping[str, Training] | None = None,
    *,
    resumes: Mapping[str, tuple[Training, Training]] | None = None,
    steps: int | Sequence[int] = 2,
    names: Mapping[str, str] | None = None,
    tolerance: float | None = None,
    modules: bool | str = False,
    timeout_sec: float = 300,
    json_path: Path | None = None,
) -> dict[str, Verdict]:
    """Records trainings in processes of their own, and asserts that each is the reference.

    Prints the verdicts with all details; pytest shows them for a test that fails, or with `-rA`.

    A command is run without a shell. A function must be importable; its processes have the
    variables that `torchrun` sets, so that `dist.init_process_group("gloo")` needs no argument. A
    variant with a fault is run a second time, which tells a bug from a race or broken hardware.

    Args:
        reference: the training on one device.
        variants: name → another way to run it.
        resumes: name → a training that saves a checkpoint and ends early or is killed, and the one
            that resumes from it, which is to be the training that was never interrupted.
        steps: numbers of the steps to record, from 0; or the number of first steps.
        names: name of a weight in the variants → its name in the reference, if they do not match.
        tolerance: relative difference of gradients to allow; None to compute it from a second run
            of the reference with permuted examples.
        modules: whether recorders of PyTorch record all modules; or a pattern of their names.
        timeout_sec: time limit of each run.
        json_path: file for the verdicts; after a training that failed, there is none.

    Returns:
        Name of the variant → its verdict.

    Raises:
        AssertionError: a variant is not the same training; the text is its verdict. Or a training
            failed, reached its time limit or recorded nothing.
        ValueError: an argument is wrong, or the recordings have nothing in common.
    """
    __tracebackhide__ = True  # pytest shows the line of the test, and the verdict.
    settings = Settings(steps, names or {}, tolerance, modules, timeout_sec)
    variants, resumes = {} if variants is None and resumes else variants, resumes or {}
    if not (isinstance(variants, Mapping) and (variants or resumes)):
        raise ValueError(f"variants: {variants!r} is no object with a name for each training")
    for name, both in resumes.items():
        if name in variants or not (isinstance(both, tuple) and len(both) == 2):
            raise ValueError(f"resumes: {name!r} has no two trainings, or is a variant's name")
    if json_path is not None:
        pathlib.Path(json_path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(json_path).unlink(missing_ok=True)
    try:
        verdicts = verify_trainings(reference, variants, settings, resumes)
    except TrainingError as error:
        raise AssertionError(str(error)) from None
    _require_same(verdicts, json_path)
    return verdicts


def _require_same(verdicts: dict[str, Verdict], json_path: Path | None) -> None:
    """Prints the verdicts, writes them, and raises AssertionError if a training is another one."""
    __tracebackhide__ = True
    print(describe([*verdicts.values()], details=True))
    where = "on standard output"
    if json_path is not None:
        pathlib.Path(json_path).write_text(json.dumps(record_of_all(verdicts), indent=1) + "\n")
        where += f" and in {json_path}"
    texts = [describe([verdict]) for verdict in verdicts.values() if not verdict.ok]
    if texts:
        texts.append(f"all verdicts, with the nodes that were compared: {where}")
        raise AssertionError("\n\n".join(texts))
