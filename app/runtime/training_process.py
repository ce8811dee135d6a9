"""Runs a training command as a child process."""

import pathlib
from collections.abc import Sequence

from app.runtime import signals
from app.runtime.run_context import PART_VARIABLE
from app.runtime.subprocesses import Subprocess, child_environment, main_command


def train_in_child_process(words: Sequence[str], run_dir: pathlib.Path) -> int:
    """Runs a training command with `--out=run_dir` as a child process and returns its exit code.

    Two MirroredStrategies of different size in one process break every later collective, and each
    training should run in the environment of a user's own run.

    Args:
        words: command and flags.
        run_dir: run directory.

    Raises:
        KeyboardInterrupt, Terminated: a signal was received; the child has saved its state.
    """
    child = Subprocess(
        main_command([*words, f"--out={run_dir}"]),
        child_environment(**{PART_VARIABLE: "1"}),  # This process prints the command that resumes.
        death_signal=signals.STOP_REQUEST,  # The child saves and exits.
    )
    with signals.deferred(child.ask_to_stop):
        exit_code = child.wait() or 0
    signals.check()
    return exit_code
