"""Asserts in a test that several ways to run a training are the same training.

    def test_two_processes_train_like_one():
        lockstep.assert_same_training(
            "python train.py", {"ddp": "torchrun --nproc_per_node=2 train.py"}
        )

Each training records itself: it has a recorder's `with` block. While a test runs it, the variable
`LOCKSTEP_RECORD` gives the recorder its file, steps, replay and permute in place of its arguments.
"""

import dataclasses
import json
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import pickle
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lockstep.comparison import compare_traces
from lockstep.trace_file import TraceError, load
from lockstep.verdict import Verdict

VARIABLE = "LOCKSTEP_RECORD"  # Read by the recorders.
_MOST_LINES = 15  # Of what a failed command printed.

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
    timeout_sec: float = 300,
) -> dict[str, Verdict]:
    """Records trainings in processes of their own, and asserts that each is the reference.

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
        timeout_sec: time limit of each run.

    Returns:
        Name of the variant → its verdict.

    Raises:
        AssertionError: a variant is not the same training; the text is its verdict. Or a training
            failed, reached its time limit or recorded nothing.
        ValueError: the recordings have nothing in common.
    """
    numbers = list(range(steps)) if isinstance(steps, int) else list(steps)
    with tempfile.TemporaryDirectory(prefix="lockstep-") as folder:

        def record(name: str, training: Training, **options: Any) -> str:
            path = str(pathlib.Path(folder, f"{name}.npz"))
            _record(name, training, {"path": path, "steps": numbers, **options}, timeout_sec)
            return path

        one = record("reference", reference, replay=None, permute=None)
        files = [one]
        if tolerance is None:
            files.append(record("permuted", reference, replay=one, permute=1))

        def verdict_of(name: str, training: Training) -> Verdict:
            path = record(name, training, replay=one, permute=None)
            traces = [load(file) for file in (*files, path)]
            *_, verdict = compare_traces(traces, names or {}, tolerance).values()
            return dataclasses.replace(verdict, name=name)

        verdicts = {name: verdict_of(name, training) for name, training in variants.items()}
        for name, verdict in verdicts.items():
            if not verdict.ok:
                verdicts[name] = _repeated(verdict, verdict_of(name, variants[name]))
    wrong = [str(verdict) for verdict in verdicts.values() if not verdict.ok]
    if wrong:
        raise AssertionError("\n\n".join(wrong))
    return verdicts


def _repeated(verdict: Verdict, second: Verdict) -> Verdict:
    """Returns a verdict with a note on whether a second run of the training has the same faults."""
    faults = [
        {(fault.stage, fault.cause, fault.tensors) for fault in each.faults}
        for each in (verdict, second)
    ]
    if faults[0] == faults[1]:
        note = "reproducible: a second run from the same states has the same faults"
    else:
        count = len(faults[0] & faults[1])
        note = (
            f"not reproducible: a second run from the same states has {count} of these"
            f" {len(faults[0])} faults; look for a race, an uninitialised buffer or broken hardware"
        )
    return dataclasses.replace(verdict, notes=(*verdict.notes, note))


def _record(name: str, training: Training, options: Mapping[str, Any], timeout_sec: float) -> None:
    """Runs a training, which writes a recording.

    Raises:
        AssertionError: it failed, or wrote none.
    """
    variables = {VARIABLE: json.dumps(options)}
    if isinstance(training, tuple) and callable(training[0]):
        error = _call(training[0], int(training[1]), variables, timeout_sec)
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
    words = shlex.split(command) if isinstance(command, str) else list(map(str, command))
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
    printed = "\n".join(process.stdout.splitlines()[-_MOST_LINES:])
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
