"""Calls a function in a separate process, in the environment of a user's own run."""

import contextlib
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any, Self, TypeVar

from app.runtime.errors import DeviceError, LockstepError, StalledError
from app.runtime.function_call import Channel
from app.runtime.subprocesses import GRACE_SEC, Subprocess, child_environment
from app.runtime.temporary_directories import TemporaryDirectory

Result = TypeVar("Result")

_CHILD_MAIN = pathlib.Path(__file__).with_name("child_main.py")


class ChildProcess:
    """Runs a function in a new process and exchanges messages with it; a context manager.

    Leaving the context ends the process and removes its temporary files, which a killed process
    cannot do itself.

    Args:
        function: a module-level function, with picklable arguments and result; its first argument
            is a `Channel`.
        *arguments: further arguments.
        environment: variables in addition to those of this process.
        death_signal: signal that the process gets if this one ends without having ended it.
        pass_descriptors: file descriptors that the process inherits, with the same numbers.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        death_signal: signal.Signals = signal.SIGKILL,
        pass_descriptors: Sequence[int] = (),
    ):
        self._call, self._pass_descriptors = (function, arguments), pass_descriptors
        self._environment, self._death_signal = environment or {}, death_signal

    def __enter__(self) -> Self:
        self._has_result = False
        call = ForkingPickler.dumps(self._call)
        with contextlib.ExitStack() as stack:
            temporary = stack.enter_context(TemporaryDirectory())
            ours, theirs = socket.socketpair()
            self._connection = Connection(ours.detach())
            stack.callback(self._connection.close)
            with theirs:
                self._process = self._start(theirs.fileno(), temporary)
            stack.callback(self._end)
            with contextlib.suppress(OSError):  # It has ended already; `receive` reports it.
                self._connection.send(sys.path)
                self._connection.send_bytes(call)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def _start(self, descriptor: int, temporary: str) -> Subprocess:
        arguments = descriptor, os.getpid(), int(self._death_signal)
        return Subprocess(
            [sys.executable, "-P", str(_CHILD_MAIN), *map(str, arguments)],
            child_environment(**{**self._environment, "TMPDIR": temporary}),
            death_signal=None,  # The child sets it itself; the caller may have many threads.
            pass_fds=[descriptor, *self._pass_descriptors],
        )

    def _end(self) -> None:
        # After it has sent its result, it has only objects to delete.
        self._process.end(grace_sec=0 if self._has_result else GRACE_SEC)

    @property
    def connection(self) -> Connection:
        """This process' end of the connection, for `multiprocessing.connection.wait`."""
        return self._connection

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if it is running."""
        self._process.signal(number)

    def send(self, message: Any) -> None:
        """Sends a message to the function, for its `receive`.

        Raises:
            The exceptions of `receive`, if the process has ended.
        """
        try:
            self._connection.send(message)
        except OSError:
            self.receive()
            raise

    def receive(self, timeout_sec: float | None = None) -> tuple[str, Any]:
        """Waits for `("message", message of the function)` or `("result", its result)`.

        Args:
            timeout_sec: maximum time; None for no limit.

        Raises:
            TimeoutError: nothing was received in time; the process is killed.
            LockstepError: the function raised it.
            DeviceError: the process was killed, as the kernel does when memory runs out.
            RuntimeError: the function raised another exception; the message ends with its
                traceback.
        """
        if timeout_sec is not None and not self._connection.poll(timeout_sec):
            self._process.signal(signal.SIGKILL)  # Native code that hangs ignores other signals.
            raise TimeoutError(f"no result within {timeout_sec:g} s")
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            raise _death(self._process) from None
        self._has_result = kind != "message"
        if kind == "error":
            raise value
        return kind, value


def call_in_child_process(
    function: Callable[..., Result],
    *arguments: Any,
    on_message: Callable[[Any], None] = lambda message: None,
    timeout_sec: float | None = None,
) -> Result:
    """Returns `function(send, *arguments)`, computed in a new process.

    Args:
        function: a module-level function, with picklable arguments and result. Its calls of `send`
            call `on_message` here.
        *arguments: further arguments of the function.
        on_message: called with each message, in order.
        timeout_sec: maximum time to wait for each message and the result; None for no limit.

    Raises:
        The exceptions of `ChildProcess.receive`.
    """
    with ChildProcess(call_function, function, *arguments) as process:
        while True:
            kind, value = process.receive(timeout_sec)
            if kind == "result":
                return value
            on_message(value)


def call_function(channel: Channel, function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function that only sends messages: its first argument is `channel.send`."""
    return function(channel.send, *arguments)


def _death(process: Subprocess) -> LockstepError:
    """Waits for the end of a process whose connection is closed; returns the error to raise."""
    return death_error(process.wait(), was_killed=process.was_killed)


def death_error(exit_code: int | None, *, was_killed: bool) -> LockstepError:
    """Returns the error for a process that ended without a result.

    Args:
        exit_code: exit code as a shell reports it.
        was_killed: whether a signal ended the process.
    """
    if was_killed and exit_code == 128 + signal.SIGKILL:
        return DeviceError(
            "a subprocess was killed, probably because memory ran out; use a smaller"
            " --global_batch_size or fewer devices"
        )
    if exit_code == StalledError.exit_code:
        return StalledError(
            "a subprocess made no progress and was stopped; see its output above and run the same"
            " command again"
        )
    return DeviceError(
        f"a subprocess ended early with exit code {exit_code}; run the same command again"
    )
