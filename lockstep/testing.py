"""Asserts in a test that several ways to run a training are the same training.

    def test_two_processes_train_like_one():
        lockstep.assert_same_training(
            "python train.py", {"ddp": "torchrun --nproc_per_node=2 train.py"}
        )

Each training records itself: it has a recorder's `with` block, where the path may be None. While a
test runs it, the variable `LOCKSTEP_RECORD` gives the recorder its file, steps, replay and permute
in place of its arguments. The training runs to its end: give it few steps.
"""

import dataclasses
import itertools
import json
import multiprocessing
import multiprocessing.connection
import operator
import os
import pathlib
import pickle
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.answer.json import record_of_all
from lockstep.answer.text import describe
from lockstep.answer.verdict import Verdict, note_of_repetition
from lockstep.comparison import compare_traces
from lockstep.data.file import Path, TraceError, load

VARIABLE = "LOCKSTEP_RECORD"  # Read by the recorders.
_MOST_LINES = 15  # Of what a failed command printed.
_LOG_LINE = re.compile(r"[IW]\d{4} \d\d:|WARNING: All log messages before absl")

Function = Callable[[], None]
# A command, a function, or a function and the number of processes that call it at once.
Training = str | Sequence[str] | Function | tuple[Function, int]


def assert_same_training(
    reference: Training,
    variants: Mapping[str, Training],
    *,
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
        steps: numbers of the steps to record, from 0; or the number of first steps.
        names: name of a weight in the variants → its name in the reference, if they do not match.
        tolerance: relative difference of gradients to allow; None to compute it from a second run
            of the reference with permuted examples.
        modules: whether recorders of PyTorch record all modules, so that the first wrong one is
            named; or a pattern of their names, such as "layers.*.attention".
        timeout_sec: time limit of each run.
        json_path: file for the verdicts, whether right or wrong, as docs/for_agents.md describes;
            after a training that failed, there is none.

    Returns:
        Name of the variant → its verdict.

    Raises:
        AssertionError: a variant is not the same training; the text is its verdict with the first
            finding. Or a training failed, reached its time limit or recorded nothing.
        ValueError: an argument is wrong, or the recordings have nothing in common.
    """
    __tracebackhide__ = True  # pytest shows the line of the test, and the verdict.
    wanted = _steps(steps)
    if not (isinstance(variants, Mapping) and variants):
        raise ValueError(f"variants: {variants!r} is no object with a name for each training")
    for name, training in {"reference": reference, **variants}.items():
        _require_training(name, training)
    if tolerance is not None and not 0 <= tolerance < 1:
        raise ValueError(f"tolerance: {tolerance!r} is not at least 0 and less than 1")
    if not timeout_sec > 0:
        raise ValueError(f"timeout_sec: {timeout_sec!r} is not a positive number")
    if json_path is not None:
        pathlib.Path(json_path).parent.mkdir(parents=True, exist_ok=True)
        pathlib.Path(json_path).unlink(missing_ok=True)
    numbers = itertools.count(1)  # Of recordings; a name may be no name of a file.
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:

        def record(file: str, name: str, training: Training, **options: Any) -> str:
            __tracebackhide__ = True
            path = str(pathlib.Path(folder, file))
            given = {"path": path, "steps": wanted, "modules": modules, **options}
            _record(name, training, given, timeout_sec)
            return path

        one = record("reference.npz", "reference", reference, replay=None, permute=None)
        files = [one]
        if tolerance is None:
            permuted = record("permuted.npz", "reference", reference, replay=one, permute=1)
            files.append(permuted)

        def verdict_of(name: str, training: Training) -> Verdict:
            __tracebackhide__ = True
            file = f"variant{next(numbers)}.npz"
            path = record(file, name, training, replay=one, permute=None)
            traces = [load(file) for file in (*files, path)]
            *_, verdict = compare_traces(traces, names or {}, tolerance).values()
            return dataclasses.replace(verdict, name=name, reference="reference training")

        verdicts = {name: verdict_of(name, training) for name, training in variants.items()}
        for name, verdict in verdicts.items():
            if not verdict.ok:
                note = note_of_repetition(verdict, verdict_of(name, variants[name]))
                verdicts[name] = dataclasses.replace(verdict, notes=(*verdict.notes, note))
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
    texts = [describe([verdict], most=1) for verdict in verdicts.values() if not verdict.ok]
    if texts:
        raise AssertionError("\n\n".join([*texts, f"all findings, stages and sizes: {where}"]))


def _steps(steps: int | Sequence[int]) -> list[int]:
    """Returns the numbers of the steps to record.

    Raises:
        ValueError: they are not whole numbers from 0 in ascending order.
    """
    try:
        given = range(operator.index(steps))  # type: ignore[arg-type]
    except TypeError:
        given = steps  # type: ignore[assignment]
    try:
        wanted = [operator.index(step) for step in given]
    except TypeError:
        wanted = []
    if not wanted or wanted != sorted({*wanted}) or wanted[0] < 0:
        raise ValueError(f"steps: {steps!r} are no whole numbers from 0 in ascending order")
    return wanted


def _require_training(name: str, training: Any) -> None:
    """Raises ValueError unless a training is one that can be run in other processes."""
    function = training
    if isinstance(training, tuple) and training and callable(training[0]):
        function, *numbers = training
        if len(numbers) != 1 or type(numbers[0]) is not int or numbers[0] < 1:
            raise ValueError(f"{name}: {training!r} is no function and a number of processes")
    if callable(function):
        try:
            pickle.dumps(function)
        except Exception as error:
            raise ValueError(
                f"{name}: {function!r} cannot be sent to another process ({error}); define it"
                " at the top level of a module"
            ) from None
        return
    try:
        words = _words(training)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: {training!r} is no command and no function ({error})") from None
    if not words or any("\0" in word for word in words):
        raise ValueError(f"{name}: {training!r} is no command")


def _words(command: str | Sequence[str]) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else list(map(str, command))


def _record(name: str, training: Training, options: Mapping[str, Any], timeout_sec: float) -> None:
    """Runs a training, which writes a recording.

    Raises:
        AssertionError: it failed, or wrote none.
    """
    __tracebackhide__ = True
    variables = {VARIABLE: json.dumps(options)}
    if isinstance(training, tuple) and callable(training[0]):
        error = _call(training[0], training[1], variables, timeout_sec)
    elif callable(training):
        error = _call(training, 1, variables, timeout_sec)
    else:
        error = _run(training, variables, timeout_sec)  # type: ignore[arg-type]
    if error:
        raise AssertionError(f"{name}: the training {error}")
    try:
        load(options["path"])
    except TraceError as unread:
        raise AssertionError(
            f"{name}: the training recorded nothing that can be read; put its steps into the `with`"
            f" block of a recorder ({unread})"
        ) from None


def _run(command: str | Sequence[str], variables: Mapping[str, str], timeout_sec: float) -> str:
    """Runs a command; returns what went wrong, or ""."""
    words = _words(command)
    # `python` and `torchrun` are those of the environment that runs the test.
    paths = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    environment = {**os.environ, **variables, "PATH": os.pathsep.join(paths)}
    try:
        process = subprocess.run(
            words, env=environment, timeout=timeout_sec, check=False, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"did not end within {timeout_sec:g} s: {shlex.join(words)}"
    except OSError as error:
        return f"could not be started: {shlex.join(words)}: {error.strerror}"
    if process.returncode == 0:
        return ""
    lines = [line for line in process.stdout.splitlines() if not _LOG_LINE.match(line)]
    printed = "\n".join((lines or process.stdout.splitlines())[-_MOST_LINES:])
    return f"ended with exit code {process.returncode}: {shlex.join(words)}\n{printed}"


def _call(
    function: Function, num_processes: int, variables: Mapping[str, str], timeout_sec: float
) -> str:
    """Calls a function in new processes; returns what went wrong, or ""."""
    context = multiprocessing.get_context("spawn")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    group |= {"WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    group.setdefault("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))
    pickled, processes = pickle.dumps(function), []
    for rank in range(num_processes):
        own = {**group, **variables, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        processes.append(context.Process(target=_call_with, args=(pickled, own)))
    for process in processes:
        process.start()
    try:
        return _wait(processes, timeout_sec)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _wait(processes: Sequence[Any], timeout_sec: float) -> str:
    """Waits for all processes, or the first that fails; returns what went wrong, or ""."""
    left, end = list(processes), time.monotonic() + timeout_sec
    while left:
        ended = multiprocessing.connection.wait(
            [process.sentinel for process in left], max(0.0, end - time.monotonic())
        )
        if not ended:
            return f"did not end within {timeout_sec:g} s"
        for process in [p for p in left if p.sentinel in ended]:
            process.join()
            left.remove(process)
            if process.exitcode:
                rank = processes.index(process)
                return f"ended with exit code {process.exitcode} in process {rank}"
    return ""


def _call_with(pickled: bytes, variables: Mapping[str, str]) -> None:
    """Calls a function in a new process: its module is imported with the variables set."""
    os.environ.update(variables)
    pickle.loads(pickled)()
