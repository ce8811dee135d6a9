"""Starts and ends other programs."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from app.runtime import signals
from app.runtime.console import PART_VARIABLE

_MAIN = pathlib.Path(__file__).parents[2] / "main.py"
_GRACE_SEC = 5.0


def main_command(words: Sequence[str]) -> list[str]:
    """Returns the command line that runs this program with a command and flags."""
    return [sys.executable, str(_MAIN), *words]


def child_environment(**changes: str) -> dict[str, str]:
    """Returns the environment of this process, with changes, for a child process."""
    return {**os.environ, **changes}


class Subprocess(subprocess.Popen[bytes]):
    """A process that runs one program, and ends when this process does.

    Args:
        command: program and arguments.
        environment: environment of the process; see `child_environment`.
        death_signal: signal that the kernel sends to the process if this one ends, even if killed:
            SIGKILL, or `signals.STOP_REQUEST` for a process that saves.
        cores: numbers of the processor cores that the process may use; empty for all.
        **options: options of `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        death_signal: signal.Signals = signal.SIGKILL,
        cores: Sequence[int] = (),
        **options: Any,
    ):
        def settle_in() -> None:  # Between fork and exec; must not import or print.
            signals.end_with_parent(death_signal)
            limit_cores(cores)

        super().__init__(
            command, env=environment, stdin=subprocess.DEVNULL, preexec_fn=settle_in, **options
        )

    @property
    def exit_code(self) -> int | None:
        """The exit code as a shell reports it, 128 and above for a signal; None while it runs."""
        code = self.poll()
        return code if code is None or code >= 0 else 128 - code

    def ask_to_stop(self) -> None:
        """Asks a process of this program to save and exit."""
        self.send_signal(signals.STOP_REQUEST)

    def end(self, *, grace_sec: float = _GRACE_SEC) -> None:
        """Ends the process and waits until it has ended.

        Args:
            grace_sec: time after SIGTERM before it is killed; 0 to kill it at once.
        """
        if grace_sec:
            self.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(grace_sec)
        self.kill()
        self.wait()


def train_in_child_process(words: Sequence[str], run_dir: pathlib.Path) -> int:
    """Runs a training command with `--out=run_dir` as a child process and returns its exit code.

    Two MirroredStrategies of different size in one process break every later collective, and each
    training should run in the environment of a user's own run.

    Raises:
        KeyboardInterrupt, Terminated: a signal was received; the child has saved its state.
    """
    child = Subprocess(
        main_command([*words, f"--out={run_dir}"]),
        child_environment(**{PART_VARIABLE: "1"}),  # This process prints the command that resumes.
        death_signal=signals.STOP_REQUEST,
    )
    with signals.deferred(child.ask_to_stop):
        child.wait()
    signals.check()
    return child.exit_code or 0


def limit_cores(cores: Sequence[int]) -> None:
    """Limits this process to some processor cores, if the system can; empty for no limit."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def output_of(command: Sequence[str], *, timeout_sec: float) -> str:
    """Returns the standard output of another program.

    Raises:
        OSError: the program cannot be started, fails, or does not end in time.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_sec, check=True
        )
    except subprocess.SubprocessError as error:
        raise OSError(str(error)) from error
    return done.stdout
