"""Starts other processes, exchanges messages with those that call a function, and ends them all."""

import contextlib
import functools
import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any, NoReturn, TypeVar

from app.runtime import signals
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

_ROOT = pathlib.Path(__file__).parents[2]


class Process(subprocess.Popen[bytes]):
    """A process that ends when this one does; leaving the `with` statement kills it.

    Args:
        command: program and arguments.
        environment: variables in addition to those of this process; None removes one.
        death_signal: signal that the kernel sends to the process if this one ends, even if killed:
            SIGKILL, or `signals.STOP_REQUEST` for a process that saves; None to leave it to the
            process.
        cores: numbers of the processor cores that the process may use; empty for all.
        keeps_errors: whether `last_line` is known, and nothing is printed on standard error.
        **options: options of `subprocess.Popen`. With `start_new_session`, all processes of the
            session are killed.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str | None] | None = None,
        death_signal: signal.Signals | None = signal.SIGKILL,
        cores: Sequence[int] = (),
        keeps_errors: bool = False,
        **options: Any,
    ):
        parent, variables = os.getpid(), {**os.environ, **(environment or {})}
        self._has_session = options.get("start_new_session", False)
        # Not a pipe, which would not be read until the end.
        self._errors = tempfile.TemporaryFile() if keeps_errors else None  # noqa: SIM115

        def settle_in() -> None:  # Between fork and exec; must not import or print.
            if death_signal:
                signals.end_with_parent(death_signal, parent)
            limit_cores(cores)

        super().__init__(
            command,
            env={name: value for name, value in variables.items() if value is not None},
            preexec_fn=settle_in if death_signal or cores else None,
            **{"stdin": subprocess.DEVNULL, "stderr": self._errors, **options},
        )

    def __exit__(self, *exception: Any) -> None:
        self.kill()  # In native code that hangs, it responds to no other signal.
        if self._has_session:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)
        super().__exit__(*exception)

    @property
    def last_line(self) -> str:
        """The last line on standard error; "" without one."""
        if self._errors is None:
            return ""
        self._errors.seek(0)
        return b"".join([*self._errors][-1:]).decode(errors="replace").strip()

    @property
    def exit_code(self) -> int | None:
        """The exit code as a shell reports it, 128 and above for a signal; None while it runs."""
        code = self.poll()
        return code if code is None or code >= 0 else 128 - code


def start_program(
    words: Sequence[str], *, environment: Mapping[str, str] | None = None, **options: Any
) -> Process:
    """Starts this program with a command and flags.

    Args:
        words: command and flags.
        environment, **options: options of `Process`.
    """
    command = [sys.executable, str(_ROOT / "main.py"), *words]
    environment = {PART_VARIABLE: "1", **(environment or {})}
    return Process(command, environment=environment, **options)


def output_of(
    command: Sequence[str], *, timeout_sec: float, environment: Mapping[str, str] | None = None
) -> tuple[int, str]:
    """Returns the exit code of another program, and what it prints, errors included.

    Raises:
        OSError: the program cannot be started, or does not end in time.
    """
    with Process(
        command,
        environment=environment,
        death_signal=None,  # TensorFlow has threads already, so no code between fork and exec.
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    ) as process:
        try:
            text, _ = process.communicate(timeout=timeout_sec)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(str(error)) from error
    return process.exit_code or 0, text.decode(errors="replace")


class Channel:
    """The connection of a function in a child process to the parent.

    Attributes:
        connection: sends and receives what the two processes exchange.
        kept: objects that are not deleted at the end, which can take 30 s.
    """

    def __init__(self, connection: Connection):
        self.connection, self.kept = connection, list[object]()

    def send(self, message: Any) -> None:
        """Sends a message."""
        self.connection.send(("message", message))

    def receive(self) -> Any:
        """Waits for a message."""
        return self.connection.recv()


class Conversation:
    """Exchanges messages with a function in another process, which gets a `Channel`.

    Attributes:
        connection: to the function.
    """

    connection: Connection

    def kill(self) -> None:
        """Ends the function's process."""
        raise NotImplementedError

    def _raise_end(self) -> NoReturn:
        """Raises the exception for a function that has ended without a result."""
        raise NotImplementedError

    def send(self, message: Any) -> None:
        """Sends a message to the function, for its `receive`.

        Raises:
            The exceptions of `receive`, if the process has ended.
        """
        try:
            self.connection.send(message)
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
        if not self.connection.poll(timeout_sec):
            self.kill()  # Native code that hangs ignores other signals.
            raise TimeoutError(f"no result within {timeout_sec:g} s")
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError):
            self._raise_end()
        if kind == "error":
            raise value
        return kind, value

    def result(self, on_message: Callable[[Any], None], timeout_sec: float | None = None) -> Any:
        """Waits for the result; calls `on_message` with each message before it; see `receive`."""
        while True:
            kind, value = self.receive(timeout_sec)
            if kind == "result":
                return value
            on_message(value)


class ChildProcess(Conversation, Process):
    """A process that calls a function and exchanges messages with this one.

    It finds modules where this process does, in the environment of a user's own run.

    Args:
        function: a module-level function, with picklable arguments and result; its first argument
            is a `Channel`.
        *arguments: further arguments.
        **options: options of `Process`.
    """

    kill = Process.kill

    def __init__(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] | None = None,
        death_signal: signal.Signals = signal.SIGKILL,
        cores: Sequence[int] = (),
        **options: Any,
    ):
        self.connection, theirs = multiprocessing.Pipe()
        script = (
            f"import sys; sys.path[:] = {[*sys.path, str(_ROOT)]!r}\n"
            "from app.runtime import processes\n"
            f"processes._be_child({theirs.fileno()}, {int(death_signal)}, {os.getpid()})"
        )
        with theirs:  # No code between fork and exec: a notebook has threads, which hold locks.
            Process.__init__(
                self,
                [sys.executable, "-c", script],
                environment={PART_VARIABLE: "1", **(environment or {})},
                death_signal=None,
                pass_fds=[theirs.fileno()],
                **options,
            )
        self.send((cores, function, arguments))

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self.connection.close()

    def _raise_end(self) -> NoReturn:
        raise _death(self.wait()) from None


class ForkedCall(Conversation):
    """A function that a fork of a prepared process calls; see `prepared_calls`."""

    def __init__(self, process: ChildProcess, function: Callable[..., Any], *arguments: Any):
        self._process = process
        self.connection, theirs = multiprocessing.Pipe()
        with theirs:
            process.send((function, arguments))
            try:
                send_handle(process.connection, theirs.fileno(), process.pid)
            except OSError:
                process.receive()
                raise

    def kill(self) -> None:
        """Ends the prepared process, and with it all its forks."""
        self._process.kill()

    def _raise_end(self) -> NoReturn:
        self._process.receive()  # It ends as its fork did.
        raise AssertionError("a prepared process sends nothing")


def call_in_child_process(
    function: Callable[..., Result],
    *arguments: Any,
    on_message: Callable[[Any], None] = lambda message: None,
    timeout_sec: float | None = None,
    **options: Any,
) -> Result:
    """Returns `function(send, *arguments)`, computed in a new process.

    Args:
        function: a module-level function, with picklable arguments and result. Its calls of `send`
            call `on_message` here.
        *arguments: further arguments of the function.
        on_message: called with each message, in order.
        timeout_sec: maximum time to wait for each message and the result; None for no limit.
        **options: options of `Process`.

    Raises:
        The exceptions of `ChildProcess.receive`.
    """
    with ChildProcess(call_function, function, *arguments, **options) as process:
        return process.result(on_message, timeout_sec)


@contextlib.contextmanager
def prepared_calls(
    prepare: Callable[[], Mapping[str, Any]],
) -> Iterator[Callable[..., Conversation]]:
    """Yields a function that starts calls in processes that share what takes long to prepare.

    Its arguments are those of `ChildProcess`, without options. Calls run at once; leaving the
    `with` statement ends them.

    Args:
        prepare: called once, in the process of which each call is a fork; returns keyword arguments
            of all functions. It may import TensorFlow, but run no operations, whose threads a fork
            would not have.
    """
    with ChildProcess(_fork_for_each_call, prepare) as process, contextlib.ExitStack() as stack:

        def start(function: Callable[..., Any], *arguments: Any) -> ForkedCall:
            call = ForkedCall(process, function, *arguments)
            stack.enter_context(call.connection)
            return call

        yield start


def call_function(
    channel: Channel, function: Callable[..., Result], *arguments: Any, **prepared: Any
) -> Result:
    """Calls a function that only sends messages: its first argument is `channel.send`."""
    return function(channel.send, *arguments, **prepared)


def limit_cores(cores: Sequence[int]) -> None:
    """Limits this process to some processor cores, if the system can; empty for no limit."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def _death(code: int) -> BaseException:
    """Returns the exception for a process that ended without a result; < 0 is a signal."""
    if code == -signal.SIGKILL:
        return DeviceError(
            "a subprocess was killed, probably because memory ran out; use a smaller"
            " --global_batch_size or fewer devices"
        )
    code = code if code >= 0 else 128 - code  # As of a shell.
    if code == INTERRUPTED_EXIT_CODE:
        return KeyboardInterrupt()
    if code == TERMINATED_EXIT_CODE:
        return Terminated()
    if code == StalledError.exit_code:
        return StalledError(
            "a subprocess made no progress and was stopped; see its output above and run the same"
            " command again"
        )
    return DeviceError(
        f"a subprocess ended early with exit code {code}; run the same command again"
    )


def _be_child(number: int, death_signal: int, parent: int) -> None:
    """Calls the function that comes over a connection, the file descriptor `number`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The parent gets the signal, too, and acts on it.
    signals.end_with_parent(death_signal, parent)
    channel = Channel(Connection(number))
    cores, function, arguments = channel.receive()
    limit_cores(cores)
    _answer(channel, function, arguments)


def _answer(channel: Channel, function: Callable[..., Any], arguments: Sequence[Any]) -> NoReturn:
    """Sends the function's result or its exception, and ends the process."""
    with contextlib.suppress(OSError):  # The parent has ended.
        try:
            result = function(channel, *arguments)
            _flush()
            channel.connection.send(("result", result))
        except Exception as error:
            _flush()
            channel.connection.send(("error", _to_send(error)))
    os._exit(0)  # Deleting TensorFlow's objects can take 30 s.


def _flush() -> None:
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()


def _fork_for_each_call(channel: Channel, prepare: Callable[[], Mapping[str, Any]]) -> NoReturn:
    """Answers each function that comes over the connection, in a fork of this process."""
    prepared = prepare()
    signal.signal(signal.SIGCHLD, _end_as_a_fork)
    while True:
        function, arguments = channel.receive()
        connection, parent = Connection(recv_handle(channel.connection)), os.getpid()
        if not os.fork():
            try:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signals.end_with_parent(signal.SIGKILL, parent)
                of_fork = Channel(connection)
                _answer(of_fork, functools.partial(function, **prepared), arguments)
            finally:
                os._exit(1)  # `sys.exit` has left the function: there is no answer.
        connection.close()


def _end_as_a_fork(*_: Any) -> None:
    """Ends this process as a fork of it did that sent no answer; the parent process sees it."""
    with contextlib.suppress(ChildProcessError):  # No fork is left.
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(found[1])
            if code < 0:
                os.kill(os.getpid(), -code)
            if code:
                os._exit(code)


def _to_send(error: Exception) -> Exception:
    """Returns the exception for the caller; for a bug, with the traceback as text."""
    if expected := expected_error(error):
        return expected
    traced = "".join(traceback.format_exception(error))
    return RuntimeError(f"{type(error).__name__}: {error}\n{traced}")
