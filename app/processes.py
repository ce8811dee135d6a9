"""Calls a function in a process of its own, which TensorFlow finds as a user's own run would."""

import contextlib
import multiprocessing
import signal
import sys
import traceback
from collections.abc import Callable

from app.errors import DeviceError, LockstepError

_GRACE_SEC = 5
_CONTEXT = multiprocessing.get_context("spawn")  # A fork would share TensorFlow's threads.


def call_in_own_process(
    function: Callable, *arguments, on_message: Callable = lambda message: None
):
    """Returns `function(send, *arguments)`, computed in a new process.

    Args:
        function: of a module, with arguments and a result that can be pickled. What it passes to
            `send` reaches `on_message` here.
        *arguments: of the function.
        on_message: called with each message, in order.

    Raises:
        LockstepError: the function raised it.
        DeviceError: the process was killed, as the kernel does when memory runs out.
        RuntimeError: the function raised anything else; the text ends in its traceback.
    """
    receiver, sender = _CONTEXT.Pipe(duplex=False)
    process = _CONTEXT.Process(target=_call, args=(sender, function, arguments), daemon=True)
    process.start()
    sender.close()
    try:
        while True:
            kind, value = receiver.recv()
            if kind == "result":
                return value
            if kind == "error":
                raise value
            on_message(value)
    except EOFError:
        process.join()
        raise _death(process.exitcode) from None
    finally:
        receiver.close()
        process.join(_GRACE_SEC if sys.exc_info()[0] is None else 0)  # It may tidy up.
        for stop in (process.terminate, process.kill):
            if process.is_alive():
                stop()
                process.join(_GRACE_SEC)


def _out_of_memory(error: Exception) -> DeviceError:
    first_line = (str(error).splitlines() or ["no memory left"])[0]
    return DeviceError(
        f"{first_line} — memory for the model and its copies is required; use a smaller"
        " --global_batch_size or fewer devices"
    )


def _death(exit_code: int) -> DeviceError:
    if exit_code == -signal.SIGKILL:
        return DeviceError(
            "a process of its own was killed, as happens when memory runs out — memory for the"
            " model and its copies is required; use a smaller --global_batch_size or fewer devices"
        )
    return DeviceError(
        f"a process of its own ended with exit code {exit_code} before it was done — nobody else"
        " may end it; run the same command again"
    )


def _call(sender, function, arguments) -> None:
    """Runs in the new process: sends messages, then the result or the error."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # The caller gets it too, and ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with contextlib.suppress(BrokenPipeError):  # The caller has ended.
        try:
            result = function(lambda message: sender.send(("message", message)), *arguments)
            sender.send(("result", result))
        except BrokenPipeError:
            raise
        except Exception as error:
            sender.send(("error", _to_send(error)))


def _to_send(error: Exception) -> Exception:
    """Returns what the caller is to raise; of a bug, with the traceback, which does not travel."""
    if isinstance(error, LockstepError):
        return error
    # By its name: TensorFlow's own error is not imported for this.
    if isinstance(error, MemoryError) or type(error).__name__ == "ResourceExhaustedError":
        return _out_of_memory(error)
    traced = "".join(traceback.format_exception(error))
    return RuntimeError(f"{type(error).__name__}: {error}\n{traced}")
