"""The function call in a child process: messages, then the result or the error, to the parent."""

import contextlib
import os
import signal
import tempfile
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from types import MappingProxyType
from typing import Any, NamedTuple

from app.runtime import signals, temporary_directories
from app.runtime.errors import (
    TERMINATED_EXIT_CODE,
    LockstepError,
    is_out_of_memory,
    out_of_memory,
)
from app.runtime.run_context import RunContext


class Channel(NamedTuple):
    """What a function in a process of its own has of the one that started it."""

    send: Callable[[Any], None]
    receive: Callable[[], Any]


def run(
    connection: Connection, parent_pid: int, death_signal: signal.Signals, context: RunContext
) -> None:
    """Receives a function with its arguments and calls it: all that this process does.

    Args:
        connection: to the parent.
        parent_pid: of the parent, which may have ended meanwhile.
        death_signal: what ends this process when the parent ends.
        context: of this process, kept by the caller until the process ends.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED_EXIT_CODE))
    signals.end_with_parent(death_signal)
    if os.getppid() != parent_pid:  # It has ended before the kernel was asked.
        return
    temporary_directories.hold(tempfile.gettempdir())
    with context:
        answer(connection)


def answer(
    connection: Connection,
    first_argument: Callable[[Channel], Any] = lambda channel: channel,
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Receives a function with its arguments, calls it, and sends its result or its error.

    Args:
        connection: to the process that waits.
        first_argument: makes the function's first argument of the channel to that process.
        keywords: further arguments.
    """
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        try:
            function, arguments = connection.recv()
            channel = Channel(
                lambda message: connection.send(("message", message)), connection.recv
            )
            result = function(first_argument(channel), *arguments, **keywords)
            connection.send(("result", result))
        except (BrokenPipeError, ConnectionResetError, EOFError):  # The parent has ended.
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
