"""Starts other processes, and exchanges messages with those that call a function."""

import contextlib
import ctypes
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from app.console import PART_VARIABLE
from app.errors import DeviceError, StalledError, Terminated, expected_error

_ROOT = pathlib.Path(__file__).parents[1]
_LIBC = ctypes.CDLL(None)  # Loaded here: between fork and exec nothing may be loaded.


class Program(subprocess.Popen[bytes]):
    """A Python process of this program; leaving the `with` statement kills it."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str] | None, **popen: Any
    ):
        popen["env"] = {**os.environ, PART_VARIABLE: "1", **(environment or {})}
        super().__init__([sys.executable, *arguments], stdin=subprocess.DEVNULL, **popen)

    def __exit__(self, *exception: Any) -> None:
        self.kill()  # In native code that hangs, it responds to no other signal.
        super().__exit__(*exception)

    @property
    def exit_code(self) -> int | None:
        """The exit code as a shell reports it, 128 and above for a signal; None while it runs."""
        code = self.poll()
        return code if code is None or code >= 0 else 128 - code


def start_program(
    words: Sequence[str],
    environment: Mapping[str, str] | None = None,
    cores: Sequence[int] = (),
    **popen: Any,
) -> Program:
    """Starts this program on some or all `cores`; the kernel kills it if this process ends."""
    parent, words = os.getpid(), [str(_ROOT / "main.py"), *words]
    return Program(words, environment, preexec_fn=lambda: _settle_in(parent, cores), **popen)


def output_of(command: Sequence[str], timeout_sec: float) -> tuple[int, str]:
    """Returns exit code and output of a program; raises `OSError`, also if it takes too long."""
    streams: Any = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, timeout=timeout_sec, **streams)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(str(error)) from error
    return ended.returncode, ended.stdout.decode(errors="replace")


class Channel(NamedTuple):
    """The connection of a function in a child process to its parent."""

    connection: Connection

    def send(self, message: Any) -> None:
        """Sends a message."""
        self.connection.send(("message", message))

    def receive(self) -> Any:
        """Waits for a message."""
        return self.connection.recv()


class Child(Program):
    """A new process that calls a module-level function with a `Channel` and picklable `args`.

    It is started as `start_program` does; `quiet` discards its standard output.
    `multiprocessing.connection.wait` waits for `connection`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *args: Any,
        environment: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
        quiet: bool = False,
    ):
        self.connection, theirs = multiprocessing.Pipe()
        number, stdout = theirs.fileno(), subprocess.DEVNULL if quiet else None
        # Not by multiprocessing, which would run a user's script or notebook again.
        script = (
            f"import sys; sys.path[:] = {[*sys.path, str(_ROOT)]!r}\n"
            f"from app import children; children._be_child({number}, {os.getpid()})"
        )
        with theirs:
            super().__init__(["-c", script], environment, stdout=stdout, pass_fds=[number])
        self.send((cores, function, args))

    def send(self, message: Any) -> None:
        """Sends a message to the function, for its `receive`; raises as `receive`."""
        try:
            self.connection.send(message)
        except OSError:
            self.receive()
            raise

    def receive(self) -> tuple[str, Any]:
        """Waits for `("message", message of the function)` or `("result", its result)`.

        Raises the function's `LockstepError` or `Terminated`, and `RuntimeError` with the traceback
        for another exception; `DeviceError` if the process was killed.
        """
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self.wait()
            raise _death(self.exit_code or 0) from None
        if kind == "error":
            raise value
        return kind, value


def _settle_in(parent: int, cores: Sequence[int]) -> None:
    """Makes the kernel kill this process when its parent ends, and limits it to some cores."""
    _LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG.
    if os.getppid() != parent:  # It has ended already.
        os._exit(1)
    if cores:
        os.sched_setaffinity(0, cores)


def _be_child(number: int, parent: int) -> None:
    """Calls the function that comes over the connection of a number; sends the result or error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent gets the signal, too, and acts on it.
    connection = Connection(number)
    cores, function, args = connection.recv()
    _settle_in(parent, cores)
    try:
        answer = "result", function(Channel(connection), *args)
    except Terminated as stop:
        answer = "error", stop
    except Exception as error:
        traced = "".join(traceback.format_exception(error))
        bug = RuntimeError(f"{type(error).__name__}: {error}\n{traced}")
        answer = "error", expected_error(error) or bug
    with contextlib.suppress(OSError):  # The parent has ended, or has closed a stream.
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(answer)
    os._exit(0)  # Deleting TensorFlow's objects can take 30 s.


def _death(code: int) -> BaseException:
    """Returns the exception for a process that ended without a result."""
    if code == 128 + signal.SIGTERM:
        return Terminated()
    if code == 128 + signal.SIGKILL:
        return DeviceError(
            "a subprocess was killed, probably because memory ran out; use a smaller"
            " --global_batch_size or fewer devices"
        )
    kind = StalledError if code == StalledError.exit_code else DeviceError
    return kind(f"a subprocess ended early with exit code {code}; run the same command again")
