"""Runs trainings in processes of their own: commands, and functions in one or several processes.

The output of a training is in a file. Nothing of a training is left when it fails, reaches its time
limit or is interrupted: `torchrun` starts its processes in sessions of their own, so that all
descendants are ended, not only the process group. On Linux, those of a command whose parent has
ended are found by a variable; a training is asked to end if this process is killed.
"""

import contextlib
import ctypes
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import pickle
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Any

Function = Callable[[], None]
# A command, a function, or a function and the number of processes that call it at once.
Training = str | Sequence[str] | Function | tuple[Function, int]

# A GPU then multiplies float32 in full, not in 10 bits. A variable that is set stays.
EXACT = {"NVIDIA_TF32_OVERRIDE": "0", "JAX_DEFAULT_MATMUL_PRECISION": "highest"}

_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None

_POLL_SEC, _GRACE_SEC = 0.05, 5.0
_TOO_LONG = "did not end within"
_MOST_LINES, _MOST_BYTES = 15, 2**17  # Of what a training that failed has printed last.
_LOG_LINE = re.compile(r"[IW]\d{4} \d\d:|WARNING: All log messages before absl")
_OF_TORCHRUN = re.compile(r"E\d{4} \d\d:.*torch/distributed/elastic")  # Its report follows.
# Sequences that control a terminal: CSI, those with a text such as OSC and DCS, and others.
_ESCAPE = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\n]*?(?:\x07|\x1b\\|$)|\x1b.", re.MULTILINE
)
_MARK = "LOCKSTEP_TRAINING"  # A variable with another value for each training.
_SET_PARENT_DEATH_SIGNAL = 1  # Of prctl(2).


class TrainingError(Exception):
    """A training failed, reached its time limit or recorded nothing.

    Attributes:
        text: what went wrong.
        tail: the last lines that the training printed.
        has_ended: whether it has ended by itself, or was killed.
    """

    def __init__(self, text: str, tail: str = "", *, has_ended: bool = False) -> None:
        super().__init__(f"{text}\n{tail}" if tail else text)
        self.text, self.tail, self.has_ended = text, tail, has_ended


@dataclasses.dataclass(frozen=True)
class _Process:
    pid: int
    poll: Callable[[], int | None]  # Returns the exit code; None while the process runs.


def require_training(name: str, training: Any) -> None:
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


def require_program(name: str, training: Training) -> None:
    """Raises TrainingError if a training is a command whose program does not exist."""
    if not _is_function(training):
        words = _words(training)
        if not shutil.which(words[0], path=_search_path()):
            raise TrainingError(
                f"{name}: the training could not be started: {shlex.join(words)}: there is no"
                f" program {words[0]}; commands are run without a shell, `env NAME=VALUE COMMAND`"
                " sets a variable"
            )


def run_training(
    training: Training,
    variables: Mapping[str, str],
    log: pathlib.Path,
    timeout_sec: float,
    on_wait: Callable[[], None] = lambda: None,
) -> None:
    """Runs a training to its end.

    Args:
        training: the training.
        variables: environment variables to add to those of this process.
        log: file for what the training prints.
        timeout_sec: time limit.
        on_wait: called many times a second while the training runs.

    Raises:
        TrainingError: the training failed or reached its time limit; the text begins with a verb.
    """
    exact = {name: value for name, value in EXACT.items() if name not in os.environ}
    mark = uuid.uuid4().hex
    with open(log, "wb") as output:
        processes = _start(training, {**exact, **variables, _MARK: mark}, output)
    try:
        error = _wait(processes, timeout_sec, on_wait)
        tail = last_lines(log) if error else ""
    except BaseException:
        _end(processes, mark)
        raise
    if error:
        _end(processes, mark)
        command = "" if _is_function(training) else f": {shlex.join(_words(training))}"
        has_ended = not error.startswith(_TOO_LONG)
        raise TrainingError(error + command, tail, has_ended=has_ended)


def _is_function(training: Any) -> bool:
    return callable(training[0] if isinstance(training, tuple) and training else training)


def _words(command: Any) -> list[str]:
    return shlex.split(command) if isinstance(command, str) else list(map(str, command))


def _start(training: Any, variables: Mapping[str, str], output: IO[bytes]) -> list[_Process]:
    """Starts the processes of a training."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    if not _is_function(training):
        # The second variable is the default of torchrun's option: two runs do not share a port.
        ports = {"MASTER_PORT": port, "PET_MASTER_PORT": port}
        return [_start_command(_words(training), {**ports, **variables}, output)]
    function, size = training if isinstance(training, tuple) else (training, 1)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    group |= {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}
    group |= {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), **variables}
    context, started = multiprocessing.get_context("spawn"), list[_Process]()
    try:
        for rank in range(size):
            own = {**group, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            arguments = pickle.dumps(function), own, output.name
            process = context.Process(target=_call_with, args=arguments)
            process.start()
            poll = functools.partial(getattr, process, "exitcode")
            started.append(_Process(process.pid or 0, poll))
    except BaseException:
        _end(started)
        raise
    return started


def _start_command(
    words: Sequence[str], variables: Mapping[str, str], output: IO[bytes]
) -> _Process:
    own = {"PATH": _search_path(), "PYTHONUNBUFFERED": "1"}  # The last lines are not lost.
    try:
        process = subprocess.Popen(
            words, env={**os.environ, **own, **variables}, start_new_session=True,
            preexec_fn=functools.partial(_prctl, _SET_PARENT_DEATH_SIGNAL, signal.SIGTERM),
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    except OSError as error:
        text = f"could not be started: {shlex.join(words)}: {error.strerror}"
        raise TrainingError(text) from None
    return _Process(process.pid, process.poll)


def _search_path() -> str:
    """Returns PATH; `python` and `torchrun` are those of the environment of this process."""
    paths = [os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)]
    return os.pathsep.join(paths)


def _call_with(pickled: bytes, variables: Mapping[str, str], log: str) -> None:
    """Calls a function in a new process: its module is imported with the variables set."""
    os.setsid()
    _prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(variables)
    pickle.loads(pickled)()


def _wait(processes: Sequence[_Process], timeout_sec: float, on_wait: Callable[[], None]) -> str:
    """Waits for all processes, or the first that fails; returns what went wrong, or ""."""
    end = time.monotonic() + timeout_sec
    while True:
        codes = [process.poll() for process in processes]
        if failed := [index for index, code in enumerate(codes) if code]:
            which = f" in process {failed[0]}" if len(processes) > 1 else ""
            return _in_words(codes[failed[0]] or 0) + which
        if None not in codes:
            return ""
        if time.monotonic() > end:
            return f"{_TOO_LONG} {timeout_sec:g} s; let it train for few steps"
        on_wait()
        time.sleep(_POLL_SEC)


def _in_words(code: int) -> str:
    with contextlib.suppress(ValueError):
        return f"was ended by the signal {signal.Signals(-code).name}"
    return f"ended with exit code {code}"


def _end(processes: Sequence[_Process], mark: str = "") -> None:
    """Ends processes and all that they have started: after 5 seconds, without their consent.

    Args:
        processes: the processes.
        mark: the value of `_MARK` in the environment of what they have started.
    """
    with _without_interrupts():
        tree = [pid for process in processes for pid in _descendants(process.pid)]
        for process in processes:
            _send(process.pid, signal.SIGTERM)
        end = time.monotonic() + _GRACE_SEC
        while any(p.poll() is None for p in processes) and time.monotonic() < end:
            time.sleep(_POLL_SEC)
        for pid in (*tree, *(process.pid for process in processes), *_marked(mark)):
            _send(pid, signal.SIGKILL)
        while any(process.poll() is None for process in processes):
            time.sleep(_POLL_SEC)


@contextlib.contextmanager
def _without_interrupts() -> Iterator[None]:
    """Ignores further signals to end in the main thread: at most some seconds are left."""
    is_main = threading.current_thread() is threading.main_thread()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if is_main else ()
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _marked(mark: str) -> Iterator[int]:
    """Yields the processes with a value of `_MARK`; none without /proc."""
    for path in pathlib.Path("/proc").glob("[0-9]*/environ") if mark else ():
        with contextlib.suppress(OSError):  # It has ended, or belongs to another user.
            if f"{_MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                yield int(path.parent.name)


def _prctl(option: int, value: int) -> None:
    """Sets an attribute of this process, on Linux."""
    if _LIBC:
        _LIBC.prctl(option, value, 0, 0, 0)


def _send(pid: int, number: int) -> None:
    """Sends a signal to a process, and to its group if it leads one."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)
        return
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _descendants(pid: int) -> Iterator[int]:
    """Yields the processes that a process has started, and so on; none without /proc."""
    children: dict[int, list[int]] = {}
    for path in pathlib.Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # It has ended.
            parent = path.read_text(errors="replace").rpartition(")")[2].split()[1]
            children.setdefault(int(parent), []).append(int(path.parent.name))
    found = [pid]
    for each in found:
        yield from children.get(each, ())
        found += children.get(each, ())


def last_lines(log: pathlib.Path) -> str:
    """Returns the last lines that a training printed, without those of a launcher's own report."""
    with open(log, "rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_BYTES))
        text = _ESCAPE.sub("", file.read().decode(errors="replace"))
    text = "".join(each for each in text if each.isprintable() or each in "\n\r\t")
    lines = [line.rstrip().rpartition("\r")[2] for line in text.split("\n")]  # Progress bars.
    lines = [line for line in lines if line.strip()]
    own = [line for line in lines if not _LOG_LINE.match(line)]
    report = next((i for i, line in enumerate(own) if _OF_TORCHRUN.match(line)), len(own))
    return "\n".join((own[:report] or own or lines)[-_MOST_LINES:])
