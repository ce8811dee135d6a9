"""Starts and ends all processes of the program."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import IO

from app.runtime import signals

_MAIN = pathlib.Path(__file__).parents[2] / "main.py"
GRACE_SEC = 5.0


def main_command(words: Sequence[str]) -> list[str]:
    """Returns the command line that runs this program with a command and flags."""
    return [sys.executable, str(_MAIN), *words]


def child_environment(**changes: str) -> dict[str, str]:
    """Returns the environment of this process, with changes, for a child process.

    `TMPDIR` is this process' directory for temporary files, unless it is changed.
    """
    return {**os.environ, "TMPDIR": tempfile.gettempdir(), **changes}


class Subprocess:
    """A process that runs one program, started by the constructor.

    Args:
        command: program and arguments.
        environment: environment of the process; see `child_environment`.
        death_signal: signal that the kernel sends to the process if this one ends, even if killed:
            SIGKILL, or `signals.STOP_REQUEST` for a process that saves. None if the program sets
            it.
        cores: numbers of the processor cores that the process may use; empty for all.
        is_piped: whether output is available at `stdout` and `stderr`; implies `own_session`.
        own_session: whether the process does not receive signals of the terminal, which this
            process forwards.
        pass_fds: file descriptors that the process inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        death_signal: signal.Signals | None = signal.SIGKILL,
        cores: Sequence[int] = (),
        is_piped: bool = False,
        own_session: bool = False,
        pass_fds: Sequence[int] = (),
    ):

        def settle_in() -> None:  # Between fork and exec; must not import or print.
            if death_signal:
                signals.end_with_parent(death_signal)
            limit_cores(cores)

        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_piped else None,
            stderr=subprocess.PIPE if is_piped else None,
            start_new_session=is_piped or own_session,
            pass_fds=pass_fds,
            preexec_fn=settle_in if death_signal or cores else None,
        )

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def stdout(self) -> IO[bytes]:
        """Standard output of the process, if piped."""
        return _piped(self._process.stdout)

    @property
    def stderr(self) -> IO[bytes]:
        """Standard error of the process, if piped."""
        return _piped(self._process.stderr)

    @property
    def exit_code(self) -> int | None:
        """The exit code as a shell reports it, 128 and above for a signal; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def was_killed(self) -> bool:
        """Whether a signal ended the process."""
        return (self._process.poll() or 0) < 0

    def signal(self, number: int) -> None:
        """Sends a signal to the process, if it is running."""
        with contextlib.suppress(OSError):
            self._process.send_signal(number)

    def ask_to_stop(self) -> None:
        """Asks a process of this program to save and exit."""
        self.signal(signals.STOP_REQUEST)

    def wait(self, timeout_sec: float | None = None) -> int | None:
        """Waits for the end; returns the exit code as a shell reports it, None on a timeout."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_sec)
        return self.exit_code

    def end(self, *, grace_sec: float = GRACE_SEC) -> None:
        """Ends the process and waits until it has ended.

        Args:
            grace_sec: time after SIGTERM before it is killed; 0 to kill it at once.
        """
        if grace_sec:
            self.signal(signal.SIGTERM)
            self.wait(grace_sec)
        self.signal(signal.SIGKILL)
        self.wait()


def is_running(pid: int) -> bool:
    """Returns whether there is a process with this id on this machine."""
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # Of another user.
        return True
    return True


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


def _piped(stream: IO[bytes] | None) -> IO[bytes]:
    if stream is None:
        raise ValueError("the streams of this process are not piped")
    return stream
