"""Starts the program as a fork of this process, or as a new process.

Importing TensorFlow takes 3 s, a fork some milliseconds. This process must not have run TensorFlow
operations, because they start threads, which a fork does not inherit.
"""

import ctypes
import importlib
import os
import pathlib
import select
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence

from absl import app as absl_app

import main
from app.cli import flags
from app.runtime import signals
from app.runtime.subprocesses import main_command

_PR_SET_CHILD_SUBREAPER = 36
# Imported before the first fork, besides what `main.py` imports at its start.
_MODULES = ("tensorflow", "app.commands.train", "app.training.loop")
_MODULES += ("app.verification.step_verifier", "app.training.run_writer")


class Program:
    """The program in a process of its own session, started by the constructor.

    Args:
        words: command line without the program.
        output: file to which standard output and standard error are appended.
        environment: variables in addition to those of this process.
        prepare: called in the process before the program.
        is_fork: whether to fork this process, not to start a new one.

    Attributes:
        pid: the process id.
        output, is_fork: see above.
    """

    def __init__(
        self,
        words: Sequence[str],
        output: pathlib.Path,
        environment: Mapping[str, str],
        *,
        prepare: Callable[[], object] = lambda: None,
        is_fork: bool = True,
    ):
        if is_fork:
            for name in _MODULES:
                importlib.import_module(name)
        self.output, self.is_fork, self._code = output, is_fork, None
        self._first_step, theirs = os.pipe()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._start = time.monotonic()
        self.pid = os.fork()
        if not self.pid:
            _run(words, output, environment, prepare, theirs if is_fork else None)
        os.close(theirs)
        self._end = os.pidfd_open(self.pid)

    def wait(self, timeout_sec: float) -> int | None:
        """Returns the exit code, negative for a signal; None on a timeout."""
        if self._code is None and select.select([self._end], [], [], timeout_sec)[0]:
            _, status = os.waitpid(self.pid, 0)
            self._code = os.waitstatus_to_exitcode(status)
            os.close(self._end)
        return self._code

    def signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self._code is None:
            signal.pidfd_send_signal(self._end, number)

    def wait_for_first_step(self, timeout_sec: float) -> None:
        """Waits for the first step or the end of a fork."""
        if self._code is None:
            select.select([self._end, self._first_step], [], [], timeout_sec)

    def read_first_step_sec(self) -> float | None:
        """Returns the time from the start to the first step of an ended fork, once."""
        written = os.read(self._first_step, 8)
        os.close(self._first_step)
        return struct.unpack("d", written)[0] - self._start if written else None


def adopt_orphans() -> None:
    """Makes this process the parent of processes whose parents have ended. Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def wait_for_orphans(timeout_sec: float) -> list[str]:
    """Waits until this process has no child process; returns the command lines of those left."""
    end = time.monotonic() + timeout_sec
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return []
        if not pid:
            if time.monotonic() > end:
                lists = pathlib.Path("/proc/self/task").glob("*/children")
                pids = " ".join(path.read_text() for path in lists).split()
                return [pathlib.Path(f"/proc/{pid}/cmdline").read_text() for pid in pids]
            time.sleep(0.01)


def _run(words, output, environment, prepare, first_step) -> None:
    """Runs in the new process; does not return."""
    code = 1
    try:
        os.setsid()
        signals.end_with_parent(signal.SIGKILL)
        # As in a new process: until a command starts, SIGINT ends it.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        for number in (1, 2):
            os.dup2(descriptor, number)
        os.dup2(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC), 0)
        os.environ.update(environment)
        tempfile.tempdir = None
        prepare()
        if first_step is None:
            command = main_command(words)
            os.execv(command[0], command)
        _report_first_step(first_step)
        sys.argv = ["main.py", *words]
        flags.define_flags()
        absl_app.run(main.run_program, flags_parser=main.parse)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        os._exit(code)  # The stack of the caller must not continue here.


def _report_first_step(descriptor: int) -> None:
    """Writes the time of the first step to a pipe."""
    from app.training import loop

    original = loop.fault_point

    def pass_point(point: str) -> None:
        if point == "step":
            os.write(descriptor, struct.pack("d", time.monotonic()))
            loop.fault_point = original
        original(point)

    loop.fault_point = pass_point
