"""The Python API: runs commands from a script or a notebook."""

import contextlib
from typing import Any

from app.commands import run_command
from app.options import Config
from app.runtime import signals
from app.runtime.errors import LockstepError, Terminated
from app.runtime.processes import Channel, ChildProcess


def run(config: Config) -> Any:
    """Runs a command in a new process and returns its result; its output appears as on a terminal.

    A separate process lets a notebook train on one device and then on two, which TensorFlow does
    not allow within one process, and frees all memory at the end.

    Args:
        config: the command and its options; `Config.of` applies the command's defaults.

    Returns:
        `train`: the `Summary` of the run; `compare`: one `Summary` per strategy, in
        order; `verify`: name → `Run` with the verdict, for each training; `evaluate`: the test
        accuracy, a fraction, or with `images` probabilities `(N, num_classes)`. Other commands
        return None: they print and write their results.

    Raises:
        LockstepError: the command failed; `exit_code` is the program's.
        KeyboardInterrupt: a training was interrupted and has saved its state; the same call
            resumes.
        RuntimeError: a bug; the message ends with the traceback.
    """
    with ChildProcess(_run, config, death_signal=signals.STOP_REQUEST) as process:
        try:
            _, (is_done, result) = process.receive()
        except KeyboardInterrupt:
            process.send_signal(signals.STOP_REQUEST)
            with contextlib.suppress(LockstepError):  # It was not training yet.
                process.receive()  # The training saves its state.
            raise
    if not is_done:  # Another process stopped the training.
        raise KeyboardInterrupt
    return result


def _run(channel: Channel, config: Config) -> tuple[bool, Any]:
    """Runs a command in the new process; returns whether it finished, and its result."""
    signals.install()
    try:
        return True, run_command(config)
    except (KeyboardInterrupt, Terminated):
        return False, None
