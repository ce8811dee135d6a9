"""Calls functions in forks of one process, which has imported their modules once.

Importing TensorFlow takes 2.5 s, a fork some milliseconds. The fork server must not run TensorFlow
operations, because they start threads, which a fork does not inherit. Each fork starts its own. On
other systems than Linux, loaded libraries may not work in a fork, and each call gets a new process.
"""

import collections
import contextlib
import functools
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any, NoReturn, Self

from app.runtime import function_call, signals
from app.runtime.errors import TERMINATED_EXIT_CODE
from app.runtime.function_call import Channel
from app.runtime.processes import ChildProcess, call_function, death_error
from app.runtime.subprocesses import fork

OnMessage = Callable[[Any], None]


class Call:
    """A function call in a separate process.

    Args:
        connection: connection to the process.
        on_message: called with each message of the function.

    Attributes:
        connection: see above.
        is_done: whether the function has returned or raised, or the process has ended.
    """

    def __init__(self, connection: Connection, on_message: OnMessage):
        self.connection, self.is_done = connection, False
        self._on_message = on_message
        self._returned: Any = None
        self._error: Exception | None = None

    def receive(self) -> None:
        """Receives the next message or the end."""
        try:
            kind, value = self.connection.recv()
        except (EOFError, ConnectionResetError, pickle.UnpicklingError):  # Also within a message.
            kind, value = "error", death_error(128 + signal.SIGKILL, was_killed=True)
        if kind == "message":
            self._on_message(value)
            return
        self.is_done = True
        if kind == "error":
            self._error = value
        else:
            self._returned = value

    def result(self) -> Any:
        """Returns the function's result or raises its exception; call it when done."""
        if self._error:
            raise self._error
        return self._returned


class ForkServer:
    """Calls functions in separate processes, several in parallel; a context manager.

    Leaving the context ends all processes.

    Args:
        prepare: a module-level function, called in the fork server with a function that sends
            messages. It imports modules for the calls and returns keyword arguments for them.
        *arguments: further arguments of `prepare`.
        max_calls: maximum number of calls.
        max_running: maximum number of parallel calls.
        on_message: called with each message of `prepare`.
    """

    def __init__(
        self,
        prepare: Callable[..., Mapping[str, Any]],
        *arguments: Any,
        max_calls: int,
        max_running: int,
        on_message: OnMessage,
    ):
        self._prepare, self._on_message = (prepare, *arguments), on_message
        self._max_calls, self._max_running = max_calls, max_running
        self._running: list[Call] = []
        self._server: ChildProcess | None = None

    def __enter__(self) -> Self:
        if sys.platform != "linux":
            self._stack = contextlib.ExitStack()
            return self
        pairs = [socket.socketpair() for _ in range(self._max_calls)]
        with contextlib.ExitStack() as stack, contextlib.ExitStack() as theirs:
            self._unused = collections.deque(Connection(ours.detach()) for ours, _ in pairs)
            for connection in self._unused:
                stack.callback(connection.close)
            descriptors = [theirs.enter_context(end).fileno() for _, end in pairs]
            self._server = stack.enter_context(
                ChildProcess(_serve, descriptors, *self._prepare, pass_descriptors=descriptors)
            )
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        on_message: OnMessage = lambda message: None,
    ) -> Call:
        """Calls `function(send, *arguments, **prepared)`, at most `max_running` in parallel.

        Args:
            function: a module-level function, with picklable arguments and result. On systems
                without forks it is called without `prepared`.
            *arguments: further arguments of the function.
            on_message: called with the function's messages, during `start` and `wait`.

        Raises:
            The exceptions of `prepare`.
        """
        while len(self._running) >= self._max_running:
            self._receive()
        if self._server:
            call = Call(self._unused.popleft(), on_message)
            call.connection.send((function, arguments))
        else:
            process = self._stack.enter_context(ChildProcess(call_function, function, *arguments))
            call = Call(process.connection, on_message)
        self._running.append(call)
        return call

    def wait(self, call: Call) -> Any:
        """Returns the result of a call.

        Raises:
            The exceptions of `ChildProcess.receive`, from `prepare` or the call.
        """
        while not call.is_done:
            self._receive()
        return call.result()

    def _receive(self) -> None:
        """Waits for a message from any process, and receives it."""
        calls = {call.connection: call for call in self._running}
        server = [self._server.connection] if self._server else []
        for connection in wait([*server, *calls]):
            if connection in calls:
                calls[connection].receive()
            elif self._server:
                _, message = self._server.receive()
                self._on_message(message)
        self._running = [call for call in self._running if not call.is_done]


def _serve(
    channel: Channel, descriptors: Sequence[int], prepare: Callable[..., Any], *arguments: Any
) -> NoReturn:
    """Runs in the fork server: creates a fork for each connection with a call."""
    prepared = prepare(channel.send, *arguments)
    unused = [Connection(descriptor) for descriptor in descriptors]
    ends: dict[Connection, tuple[int, Connection]] = {}  # A fork's pipe → the fork.
    signal.signal(signal.SIGTERM, functools.partial(_end_forks, ends))
    while True:
        arrived = wait([*unused, *ends])
        for end in [end for end in ends if end in arrived]:
            _finish(*ends.pop(end))
            end.close()
        for connection in [connection for connection in unused if connection in arrived]:
            unused.remove(connection)
            end, held = Pipe(duplex=False)  # It ends with the fork, its only holder.
            others = [*unused, *ends, end]
            pid = fork(functools.partial(_run_as_fork, connection, others, prepared))
            held.close()
            ends[end] = pid, connection


def _run_as_fork(
    connection: Connection, others: Sequence[Connection], prepared: Mapping[str, Any]
) -> None:
    """Answers one call."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signals.end_with_parent(signal.SIGKILL)
    for other in others:
        other.close()
    function_call.answer(connection, lambda channel: channel.send, prepared)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()


def _finish(pid: int, connection: Connection) -> None:
    """Reports the end of a fork; not received if the result was sent before."""
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    error = death_error(128 - code if code < 0 else code, was_killed=code < 0)
    with contextlib.suppress(OSError):
        connection.send(("error", error))
    connection.close()


def _end_forks(ends: Mapping[Connection, tuple[int, Connection]], *_: object) -> NoReturn:
    """Ends all forks, then this process, so that none uses a temporary file any more."""
    for pid, _connection in ends.values():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    os._exit(TERMINATED_EXIT_CODE)
