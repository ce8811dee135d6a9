"""The commands, for a script or a notebook."""

import importlib
from typing import Any

from app.config import Config
from app.runtime import signals
from app.runtime.errors import Terminated
from app.runtime.function_call import Channel
from app.runtime.processes import ChildProcess


def run(config: Config) -> Any:
    """Runs a command and returns what it found; what it prints appears as on a terminal.

    It runs in a process of its own, so that a notebook can train on one device and then on two,
    which TensorFlow allows no process to do, and has its memory back afterwards.

    Args:
        config: the command and its options; `Config.of` gives it the command's own defaults.

    Returns:
        `train` and `launch`: the `Summary` of the run; `compare`: one for each strategy, in order;
        `verify`: a `PairVerdict` for each pair of strategies; `evaluate`: the test accuracy, a
        fraction; `predict`: probabilities `(N, num_classes)`. Others return None: what they found
        they print and write.

    Raises:
        LockstepError: what the program ends with, as an exception; its `exit_code` is the same.
        KeyboardInterrupt: a training has saved its state, and the same call goes on with it.
        RuntimeError: a bug; the text ends in its traceback.
    """
    with ChildProcess(_run, config, death_signal=signals.STOP_REQUEST) as process:
        try:
            _, (is_done, result) = process.receive()
        except KeyboardInterrupt:
            process.signal(signals.STOP_REQUEST)
            process.receive()  # It saves.
            raise
    if not is_done:  # Somebody else has stopped it.
        raise KeyboardInterrupt
    return result


def _run(channel: Channel, config: Config) -> tuple[bool, Any]:
    """Runs in the new process; returns whether the command was done, and its result."""
    try:
        with signals.handled():
            return True, importlib.import_module(f"app.commands.{config.command}").run(config)
    except Terminated:
        return False, None
