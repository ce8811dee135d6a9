"""The program itself as a child: a training that finds the machine as a user's own run would."""

import os
import pathlib
import subprocess
import sys
from collections.abc import Sequence

from app.runtime import console, signals
from app.runtime.errors import Terminated

_MAIN = pathlib.Path(__file__).parents[2] / "main.py"


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
    child = subprocess.Popen(
        [sys.executable, str(_MAIN), *words, f"--out={run_dir}"],
        env={**os.environ, console.PART_VARIABLE: "1"},  # It is for us to say how to go on.
        preexec_fn=signals.end_with_parent,
    )
    try:
        exit_code = child.wait()
    except (KeyboardInterrupt, Terminated):
        child.send_signal(signals.STOP_REQUEST)  # It saves, and leaves no training behind.
        child.wait()
        raise
    return exit_code if exit_code >= 0 else 128 - exit_code
