"""Calls a function in a process of its own, which TensorFlow finds as a user's own run would."""

import multiprocessing
from collections.abc import Callable

from app.errors import DeviceError, LockstepError, Terminated

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
        raise DeviceError(
            f"a process of its own ended with exit code {process.exitcode} before it was done"
            " — memory for the model and its copies is required; use a smaller"
            " --global_batch_size or fewer devices"
        ) from None
    finally:
        process.terminate()
        process.join()


def _call(sender, function, arguments) -> None:
    """Runs in the new process: sends messages, then the result or the error."""
    try:
        sender.send(
            ("result", function(lambda message: sender.send(("message", message)), *arguments))
        )
    except LockstepError as error:
        sender.send(("error", error))
    except (KeyboardInterrupt, Terminated, BrokenPipeError):
        pass  # The caller has ended, or is about to, and says so.
    except Exception as error:
        import traceback

        text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
        sender.send(("error", RuntimeError(text)))
