"""The program itself as a child: a training that finds the machine as a user's own run would."""

import pathlib
from collections.abc import Sequence

from app.runtime import signals
from app.runtime.errors import Terminated
from app.runtime.run_context import PART_VARIABLE
from app.runtime.subprocesses import Subprocess, child_environment, main_command


def train_in_child_process(words: Sequence[str], run_dir: pathlib.Path) -> int:
    """Runs a training command with `--out=run_dir` as a child and returns its exit code.

    Two MirroredStrategies of different size in one process break every later collective, and each
    training should find the machine as a user's own run would.

    Args:
        words: command and flags.
        run_dir: where it goes.

    Raises:
        KeyboardInterrupt, Terminated: a signal came in; the child has saved its state by then.
    """
    child = Subprocess(
        main_command([*words, f"--out={run_dir}"]),
        child_environment(**{PART_VARIABLE: "1"}),  # It is for us to say how to go on.
        death_signal=signals.STOP_REQUEST,  # It saves, and leaves no training behind.
    )
    try:
        return child.wait() or 0
    except (KeyboardInterrupt, Terminated):
        child.ask_to_stop()
        child.wait()
        raise
