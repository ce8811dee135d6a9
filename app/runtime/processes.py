"""Calls functions in separate processes, in the environment of a user's own run."""

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess, SpawnProcess
from multiprocessing.reduction import DupFd
from typing import Any, NamedTuple, Self, TypeVar

from app.runtime.console import PART_VARIABLE
from app.runtime.errors import (
    INTERRUPTED_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    DeviceError,
    StalledError,
    Terminated,
    expected_error,
)

Result = TypeVar("Result")

_GRACE_SEC = 5.0
_SYS_MODULES_LOCK = threading.Lock()


class _Stream(NamedTuple):
    """A file descriptor that a child process gets when its arguments are pickled."""

    descriptor: int

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        """Returns how the child gets its own copy of the descriptor, a number there."""
        return _detach, (DupFd(self.descriptor),)


def _detach(descriptor: Any) -> int:
    return descriptor.detach()


_STREAMS = _Stream(1), _Stream(2)


class Channel(NamedTuple):
    """The child process' connection to its parent.

    Attributes:
        send: sends a message.
        receive: waits for a message.
        kept: objects that are not deleted at the end, which can take 30 s.
    """

    send: Callable[[Any], None]
    receive: Callable[[], Any]
    kept: list[object]


class ChildProcess:
    """Runs a function in a new process and exchanges messages with it; a context manager.

    Leaving the context ends the process.

    Args:
        function: a module-level function, with picklable arguments and result; its first argument
            is a `Channel`.
        *arguments: further arguments.
        environment: variables in addition to those of this process.
        death_signal: signal that the process gets if this one ends without having ended it.
        has_tensorflow: whether to fork the process of `start_tensorflow_server`, as importing
            TensorFlow takes seconds. It runs no operations, whose threads a fork would not have.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        death_signal: signal.Signals = signal.SIGKILL,
        has_tensorflow: bool = False,
    ):
        self._call = function, arguments
        self._environment, self._death_signal = environment or {}, death_signal
        self._has_tensorflow, self._has_result = has_tensorflow, False

    def __enter__(self) -> Self:
        environment = {**os.environ, **self._environment}
        self._connection, theirs = multiprocessing.Pipe()
        with theirs, _hiding_main_module():
            self._process = (ForkServerProcess if self._has_tensorflow else SpawnProcess)(
                target=_run,
                args=(theirs, *_STREAMS, self._death_signal, environment, *self._call),
            )
            self._process.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._has_result:
            self._process.join(_GRACE_SEC)
        self._process.kill()
        self._process.join()
        self._connection.close()

    @property
    def connection(self) -> Connection:
        """This process' end of the connection, for `multiprocessing.connection.wait`."""
        return self._connection

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid or 0

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if it is running."""
        if self._process.exitcode is None:
            os.kill(self.pid, number)

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
            KeyboardInterrupt, Terminated: the process was interrupted or terminated.
            RuntimeError: the function raised another exception; the message ends with its
                traceback.
        """
        if timeout_sec is not None and not self._connection.poll(timeout_sec):
            self._process.kill()  # Native code that hangs ignores other signals.
            raise TimeoutError(f"no result within {timeout_sec:g} s")
        try:
            kind, value = self._connection.recv()
        except (EOFError, ConnectionResetError):
            self._process.join()
            raise _death(self._process.exitcode or 0) from None
        self._has_result = kind != "message"
        if kind == "error":
            raise value
        return kind, value


def call_in_child_process(
    function: Callable[..., Result],
    *arguments: Any,
    on_message: Callable[[Any], None] = lambda message: None,
    timeout_sec: float | None = None,
    environment: Mapping[str, str] | None = None,
    has_tensorflow: bool = False,
) -> Result:
    """Returns `function(send, *arguments)`, computed in a new process.

    Args:
        function: a module-level function, with picklable arguments and result. Its calls of `send`
            call `on_message` here.
        *arguments: further arguments of the function.
        on_message: called with each message, in order.
        timeout_sec: maximum time to wait for each message and the result; None for no limit.
        environment, has_tensorflow: see `ChildProcess`.

    Raises:
        The exceptions of `ChildProcess.receive`.
    """
    with ChildProcess(
        call_function, function, *arguments, environment=environment, has_tensorflow=has_tensorflow
    ) as process:
        while True:
            kind, value = process.receive(timeout_sec)
            if kind == "result":
                return value
            on_message(value)


def call_function(channel: Channel, function: Callable[..., Result], *arguments: Any) -> Result:
    """Calls a function that only sends messages: its first argument is `channel.send`."""
    return function(channel.send, *arguments)


@contextlib.contextmanager
def _hiding_main_module() -> Iterator[None]:
    """Keeps `multiprocessing` from running the user's script in the child process, too."""
    with _SYS_MODULES_LOCK:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = types.ModuleType("__main__")
        try:
            yield
        finally:
            sys.modules["__main__"] = main


def start_tensorflow_server() -> None:
    """Starts the process that imports TensorFlow for children with `has_tensorflow`.

    Call it before other threads start: it redirects the standard error of this process meanwhile,
    because importing TensorFlow prints.
    """
    forkserver.set_forkserver_preload(["tensorflow", "keras"])
    variable = "TF_CPP_MIN_LOG_LEVEL"  # Read once, when TensorFlow is imported.
    level, saved = os.environ.get(variable), os.dup(2)
    os.environ.setdefault(variable, "3")
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        forkserver.ensure_running()
    finally:
        os.dup2(saved, 2)
        os.close(saved)
        if level is None:
            del os.environ[variable]


def _death(exit_code: int) -> BaseException:
    """Returns the exception for a process that ended without a result; < 0 is a signal."""
    code = exit_code if exit_code >= 0 else 128 - exit_code  # As of a shell.
    if code == INTERRUPTED_EXIT_CODE:
        return KeyboardInterrupt()
    if code == TERMINATED_EXIT_CODE:
        return Terminated()
    if code == StalledError.exit_code:
        return StalledError(
            "a subprocess made no progress and was stopped; see its output above and run the same"
            " command again"
        )
    if exit_code == -signal.SIGKILL:
        return DeviceError(
            "a subprocess was killed, probably because memory ran out; use a smaller"
            " --global_batch_size or fewer devices"
        )
    return DeviceError(
        f"a subprocess ended early with exit code {code}; run the same command again"
    )


def _run(
    connection: Connection,
    stdout: int,
    stderr: int,
    death_signal: signal.Signals,
    environment: Mapping[str, str],
    function: Callable[..., Any],
    arguments: tuple[Any, ...],
) -> None:
    """Calls the function in the new process, and sends its result or its exception."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent gets the signal, too, and acts on it.
    threading.Thread(target=_end_with_parent, args=(death_signal,), daemon=True).start()
    os.dup2(stdout, 1)  # Those of the server may be others.
    os.dup2(stderr, 2)
    os.environ.clear()
    os.environ.update(environment, **{PART_VARIABLE: "1"})
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # The parent has ended.
        kept = list[object]()
        channel = Channel(
            lambda message: connection.send(("message", message)), connection.recv, kept
        )
        try:
            connection.send(("result", function(channel, *arguments)))
        except (BrokenPipeError, ConnectionResetError):
            raise
        except Exception as error:
            connection.send(("error", _to_send(error)))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(0)  # Deleting TensorFlow's objects can take 30 s.


def _end_with_parent(death_signal: signal.Signals) -> None:
    """Waits for the end of the parent process, even if it is killed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os.kill(os.getpid(), death_signal)


def _to_send(error: Exception) -> Exception:
    """Returns the exception for the caller; for a bug, with the traceback as text."""
    if expected := expected_error(error):
        return expected
    traced = "".join(traceback.format_exception(error))
    return RuntimeError(f"{type(error).__name__}: {error}\n{traced}")
