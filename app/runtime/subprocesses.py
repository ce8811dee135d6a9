"""Starts and ends every process of this program; nothing else does."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import IO

from app.runtime import signals

_MAIN = pathlib.Path(__file__).parents[2] / "main.py"
GRACE_SEC = 5.0


def main_command(words: Sequence[str]) -> list[str]:
    """Returns the command line that runs this program with a command and flags."""
    return [sys.executable, str(_MAIN), *words]


def child_environment(**changes: str) -> dict[str, str]:
    """Returns the environment of this process, with changes, for a process that it starts.

    `TMPDIR` names the place where this process has its temporary files, unless it is changed, too.
    """
    return {**os.environ, "TMPDIR": tempfile.gettempdir(), **changes}


class Subprocess:
    """A process that runs one program, started by the constructor.

    Args:
        command: program and arguments.
        environment: of the process, see `child_environment`.
        death_signal: what the kernel sends the process when this one ends, killed even: SIGKILL,
            or `signals.STOP_REQUEST` for one that saves. None where the program sees to that.
        cores: numbers of the processor cores that the process may use; empty for all.
        is_piped: whether standard output and standard error come to `stdout` and `stderr`, and
            signals of the terminal do not reach the process: this one passes them on.
        is_silent: whether standard output is thrown away.
        pass_fds: descriptors of files that the process inherits.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        death_signal: signal.Signals | None = signal.SIGKILL,
        cores: Sequence[int] = (),
        is_piped: bool = False,
        is_silent: bool = False,
        pass_fds: Sequence[int] = (),
    ):
        output = subprocess.DEVNULL if is_silent else None

        def settle_in() -> None:  # Between fork and exec: nothing is imported or printed here.
            if death_signal:
                signals.end_with_parent(death_signal)
            limit_cores(cores)

        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if is_piped else output,
            stderr=subprocess.PIPE if is_piped else None,
            start_new_session=is_piped,
            pass_fds=pass_fds,
            preexec_fn=settle_in if death_signal or cores else None,
        )

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    @property
    def stdout(self) -> IO[bytes]:
        """What the process prints, where it is piped."""
        return _piped(self._process.stdout)

    @property
    def stderr(self) -> IO[bytes]:
        """What the process prints on standard error, where it is piped."""
        return _piped(self._process.stderr)

    @property
    def exit_code(self) -> int | None:
        """The exit code as a shell tells it, 128 and more for a signal; None while it runs."""
        code = self._process.poll()
        return code if code is None or code >= 0 else 128 - code

    @property
    def was_killed(self) -> bool:
        """Whether a signal has ended the process."""
        return (self._process.poll() or 0) < 0

    def signal(self, number: int) -> None:
        """Sends the process a signal, if it is still there."""
        with contextlib.suppress(OSError):
            self._process.send_signal(number)

    def ask_to_stop(self) -> None:
        """Asks a process of ours to save and to end."""
        self.signal(signals.STOP_REQUEST)

    def wait(self, timeout_sec: float | None = None) -> int | None:
        """Waits for the end; returns the exit code as a shell tells it, None if it still runs."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_sec)
        return self.exit_code

    def end(self, *, grace_sec: float = GRACE_SEC) -> None:
        """Ends the process, and returns once it has ended.

        Args:
            grace_sec: how long it has after SIGTERM before it is killed; 0 kills it at once.
        """
        if grace_sec:
            self.signal(signal.SIGTERM)
            self.wait(grace_sec)
        self.signal(signal.SIGKILL)
        self.wait()


def fork(run: Callable[[], object]) -> int:
    """Starts a copy of this process, which calls `run` and ends; returns its number.

    Only for a process whose threads, if there are any, need not exist in the copy.
    """
    pid = os.fork()
    if not pid:
        try:
            run()
        finally:
            os._exit(0)  # What called this function is the business of the other process.
    return pid


def limit_cores(cores: Sequence[int]) -> None:
    """Limits this process to some processor cores, where the system can; empty limits nothing."""
    if cores and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def output_of(command: Sequence[str], *, timeout_sec: float) -> str:
    """Returns what a program that is not ours prints on standard output.

    Raises:
        OSError: it cannot be started, fails, or does not end in time.
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
