"""The application: everything except the models and the strategies.

As a library: `from app import Config, run`.
"""

import contextlib
from typing import Any

from app import signals
from app.children import Channel, Child
from app.commands import run_command
from app.errors import LockstepError
from app.options import Config
from lockstep import __version__

__all__ = ["Config", "LockstepError", "__version__", "run"]


def run(config: Config) -> Any:
    """Runs a command in a new process and returns what the module of the command returns.

    A notebook can therefore train on one device and then on two, which TensorFlow does not allow
    within one process. Raises `LockstepError`, whose `exit_code` is the program's, if the command
    failed. After a `KeyboardInterrupt`, which saves the state, the same call resumes a training.
    """
    with Child(_run, config) as child:
        try:
            return child.receive()[1]
        except KeyboardInterrupt:
            child.send_signal(signals.STOP_REQUEST)
            with contextlib.suppress(LockstepError, KeyboardInterrupt, signals.Terminated):
                child.receive()  # The training saves its state.
            raise


def _run(_: Channel, config: Config) -> Any:
    signals.install()
    return run_command(config)
