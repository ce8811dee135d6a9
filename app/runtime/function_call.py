"""Calls a function in a child process and sends messages and the result to the parent."""

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
    is_from_lack_of_memory,
    out_of_memory,
)
from app.runtime.run_context import RunContext


class Channel(NamedTuple):
    """The child process' connection to its parent."""

    send: Callable[[Any], None]
    receive: Callable[[], Any]


def run(
    connection: Connection, parent_pid: int, death_signal: signal.Signals, context: RunContext
) -> None:
    """Receives a function with its arguments and calls it: the whole task of a child process.

    Args:
        connection: connection to the parent.
        parent_pid: process id of the parent, which may have ended.
        death_signal: signal that ends this process when the parent ends.
        context: context of this process, kept by the caller until the process ends.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(TERMINATED_EXIT_CODE))
    signals.end_with_parent(death_signal)
    if os.getppid() != parent_pid:  # The parent ended before the signal was set.
        return
    temporary_directories.hold(tempfile.gettempdir())
    with context:
        answer(connection)


def answer(
    connection: Connection,
    first_argument: Callable[[Channel], Any] = lambda channel: channel,
    keywords: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Receives a function with its arguments, calls it, and sends its result or its exception.

    Args:
        connection: connection to the waiting process.
        first_argument: creates the function's first argument from the channel to that process.
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
    """Returns the exception for the caller; for a bug, with the traceback as text."""
    if isinstance(error, LockstepError):
        return error
    if is_from_lack_of_memory(error):
        return out_of_memory(error)
    traced = "".join(traceback.format_exception(error))
    return RuntimeError(f"{type(error).__name__}: {error}\n{traced}")
