"""Calls a function in a process of its own, which TensorFlow finds as a user's own run would."""

import contextlib
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Self, TypeVar

from app.runtime import temporary_directories
from app.runtime.errors import (
    TERMINATED_EXIT_CODE,
    DeviceError,
    LockstepError,
    StalledError,
    is_out_of_memory,
    out_of_memory,
)
from app.runtime.temporary_directories import TemporaryDirectory

Result = TypeVar("Result")

_GRACE_SEC = 5
_CONTEXT = multiprocessing.get_context("spawn")  # A fork would share TensorFlow's threads.


class Channel(NamedTuple):
    """What a function in a process of its own has of the one that started it."""

    send: Callable[[Any], None]
    receive: Callable[[], Any]


class ChildProcess:
    """A function that runs in a new process and can be talked to; a context manager.

    Leaving the context ends the process, whatever it does, and removes its temporary files: a
    process that is killed cannot do so.

    Args:
        function: of a module, with arguments and a result that can be pickled; its first argument
            is a `Channel`.
        *arguments: the others.
        has_children: whether it may start processes itself.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, has_children: bool = False):
        self._arguments, self._is_leaf = (function, arguments), not has_children

    def __enter__(self) -> Self:
        self._has_result = False
        self._temporary = TemporaryDirectory()
        self._connection, theirs = _CONTEXT.Pipe()
        arguments = theirs, self._temporary.name, *self._arguments
        self._process = _CONTEXT.Process(target=_call, args=arguments, daemon=self._is_leaf)
        with _without_main():
            self._process.start()
        theirs.close()
        return self

    def __exit__(self, *exception: object) -> None:
        self._connection.close()
        if self._has_result:
            self._process.kill()  # It has nothing left to do but to take things apart.
        for stop in (self._process.terminate, self._process.kill):
            if self._process.is_alive():
                stop()
            self._process.join(_GRACE_SEC)
        self._temporary.cleanup()

    @property
    def connection(self) -> Connection:
        """What messages come through, to wait for."""
        return self._connection

    @property
    def pid(self) -> int:
        """The process's number."""
        if self._process.pid is None:
            raise RuntimeError("the process has not been started")
        return self._process.pid

    def signal(self, number: int) -> None:
        """Sends it a signal, if it is still there."""
        with contextlib.suppress(OSError):
            os.kill(self.pid, number)

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
            self._process.kill()  # What hangs in native code does not end by itself.
            raise TimeoutError(f"nothing came within {timeout_sec:g} s")
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise _death(self._process.exitcode) from None
        self._has_result = kind != "message"
        if kind == "error":
            raise value
        return kind, value


_hiding_main = threading.Lock()


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hides the main module from a process that is started: it would import it anew.

    What it runs never stands there; and a user's script without `if __name__ == "__main__"` would
    start all over again.
    """
    with _hiding_main:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


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
    with ChildProcess(_send_only, function, *arguments) as process:
        while True:
            kind, value = process.receive(timeout_sec)
            if kind == "result":
                return value
            on_message(value)


def _send_only(channel: Channel, function: Callable[..., Result], *arguments: Any) -> Result:
    return function(channel.send, *arguments)


def _death(exit_code: int | None) -> LockstepError:
    if exit_code == -signal.SIGKILL:
        return DeviceError(
            "a process of its own was killed, as happens when memory runs out — memory for the"
            " model and its copies is required; use a smaller --global_batch_size or fewer devices"
        )
    if exit_code == StalledError.exit_code:
        return StalledError(
            "a process of its own made no progress and was ended — a step or another sign of life"
            " is required; what it has printed says more, run the same command again"
        )
    return DeviceError(
        f"a process of its own ended with exit code {exit_code} before it was done — nobody else"
        " may end it; run the same command again"
    )


def _call(
    connection: Connection, temporary: str, function: Callable[..., Any], arguments: tuple[Any, ...]
) -> None:
    """Runs in the new process: sends messages, then the result or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The caller gets it too, and ends us.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED_EXIT_CODE))
    tempfile.tempdir = os.environ["TMPDIR"] = temporary
    temporary_directories.hold(temporary)
    channel = Channel(lambda message: connection.send(("message", message)), connection.recv)
    with contextlib.suppress(BrokenPipeError, EOFError):  # The caller has ended.
        try:
            result = function(channel, *arguments)
            connection.send(("result", result))
        except (BrokenPipeError, EOFError):
            raise
        except Exception as error:
            connection.send(("error", _to_send(error)))


def _to_send(error: Exception) -> Exception:
    """Returns what the caller is to raise; of a bug, with the traceback, which does not travel."""
    if isinstance(error, LockstepError):
        return error
    if is_out_of_memory(error):
        return out_of_memory(error)
    traced = "".join(traceback.format_exception(error))
    return RuntimeError(f"{type(error).__name__}: {error}\n{traced}")
