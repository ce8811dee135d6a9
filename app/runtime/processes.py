"""Calls a function in a process of its own, which TensorFlow finds as a user's own run would."""

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
    """A function that runs in a new process and can be talked to; a context manager.

    Leaving the context ends the process, whatever it does, and removes its temporary files: a
    process that is killed cannot do so.

    Args:
        function: of a module, with arguments and a result that can be pickled; its first argument
            is a `Channel`.
        *arguments: the others.
        environment: variables that the process has in addition to those of this one.
        death_signal: what the process gets when this one ends without having ended it.
        pass_descriptors: of files that the process inherits, under the same numbers.
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
            with contextlib.suppress(OSError):  # It has ended already: `receive` says so.
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
            death_signal=None,  # It sees to that itself: the caller may have many threads.
            pass_fds=[descriptor, *self._pass_descriptors],
        )

    def _end(self) -> None:
        # With its result sent, it has nothing left to do but to take things apart.
        self._process.end(grace_sec=0 if self._has_result else GRACE_SEC)

    @property
    def connection(self) -> Connection:
        """Our end of what connects us, for `multiprocessing.connection.wait`."""
        return self._connection

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    def signal(self, number: int) -> None:
        """Sends it a signal, if it is still there."""
        self._process.signal(number)

    def send(self, message: Any) -> None:
        """Hands the function a message, for its `receive`.

        Raises:
            What `receive` raises, if the process has ended.
        """
        try:
            self._connection.send(message)
        except OSError:
            self.receive()
            raise

    def receive(self, timeout_sec: float | None = None) -> tuple[str, Any]:
        """Waits for `("message", what the function sent)` or `("result", what it returned)`.

        Args:
            timeout_sec: how long, None for ever.

        Raises:
            TimeoutError: nothing came in time; the process is killed.
            LockstepError: the function raised it.
            DeviceError: the process was killed, as the kernel does when memory runs out.
            RuntimeError: the function raised anything else; the text ends in its traceback.
        """
        if timeout_sec is not None and not self._connection.poll(timeout_sec):
            self._process.signal(signal.SIGKILL)  # Native code that hangs does not end by itself.
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
        function: of a module, with arguments and a result that can be pickled. What it passes to
            `send` reaches `on_message` here.
        *arguments: of the function.
        on_message: called with each message, in order.
        timeout_sec: how long to wait for each message, and for the result; None for ever.

    Raises:
        What `ChildProcess.receive` raises.
    """
    with ChildProcess(call_function, function, *arguments) as process:
        while True:
            kind, value = process.receive(timeout_sec)
            if kind == "result":
                return value
            on_message(value)


def call_function(channel: Channel, function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function that only sends: its first argument is `channel.send`."""
    return function(channel.send, *arguments)


def _death(process: Subprocess) -> LockstepError:
    """Waits for the end of a process that sends no more; returns what to raise."""
    return death_error(process.wait(), was_killed=process.was_killed)


def death_error(exit_code: int | None, *, was_killed: bool) -> LockstepError:
    """Returns what to raise when a process has ended without a result.

    Args:
        exit_code: as a shell tells it.
        was_killed: whether a signal has ended it.
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
