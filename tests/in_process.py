"""The program inside the process of the tests: none of the seconds that TensorFlow takes to start.

For what a process does by itself (its streams, signals, exit code, end) there is `run_main`.
"""

import contextlib
import importlib
import io
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import types

import pytest
import tensorflow as tf

from app.cli import flags
from app.commands import compare
from app.config import Config
from app.devices import device_setup
from app.performance import case_process, rounds
from app.runtime import console, processes, signals
from app.runtime.processes import Channel

_forward = threading.local()  # Where a thread that stands for a process sends its warnings.


def parse_here(*arguments) -> Config:
    """Returns the config of a command line; raises what is wrong with it."""
    _forget_flags()
    return flags.parse_config(["main.py", *arguments])


def run_here(*arguments, env=None) -> subprocess.CompletedProcess:
    """Runs the program, with the processes that it would start as threads; asserts nothing."""
    main, argv = _import_main(), ["main.py", *map(str, arguments)]
    with (
        own_state() as patch,
        contextlib.redirect_stdout(io.StringIO()) as stdout,
        contextlib.redirect_stderr(io.StringIO()) as stderr,
    ):
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", argv)
        _forget_flags()
        try:
            code = main.main(main.parse(argv))
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(argv, code, stdout.getvalue(), stderr.getvalue())


def run_here_ok(*arguments, **options) -> subprocess.CompletedProcess:
    """Runs the program as `run_here` does and asserts that it ends with 0."""
    result = run_here(*arguments, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


class ThreadAsProcess:
    """A `processes.ChildProcess` that is a thread: its function finds what the caller has."""

    def __init__(self, function, *arguments, has_children=False):
        self._call = function, arguments
        self._to_caller, self._to_function = queue.Queue(), queue.Queue()
        self.pid = os.getpid()

    def __enter__(self):
        threading.Thread(target=self._run, daemon=True).start()
        return self

    def __exit__(self, *exception):
        self._to_function.put(None)

    def _run(self):
        function, arguments = self._call
        channel = Channel(
            lambda message: self._to_caller.put(("message", message)), self._to_function.get
        )
        try:
            self._to_caller.put(("result", function(channel, *arguments)))
        except Exception as error:
            self._to_caller.put(("error", error))

    def send(self, message):
        self._to_function.put(message)

    def receive(self, timeout_sec=None):
        kind, value = self._to_caller.get(timeout=timeout_sec or 120)
        if kind == "error":
            raise value
        return kind, value


def _train_here(words, run_dir) -> int:
    """Takes the place of `train_in_child_process`."""
    result = run_here(*words, f"--out={run_dir}")
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    return result.returncode


@contextlib.contextmanager
def own_state():
    """Within it a command changes nothing of the process for those after it."""
    tf.config.list_logical_devices()  # From here on their number is fixed, and no command's.
    log = logging.getLogger("lockstep")
    handlers = list(log.handlers)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signals, "install", lambda: None)
        patch.setattr(device_setup, "_use_own_temporary_directory", lambda: None)
        patch.setattr(console, "forward_warnings", lambda to: setattr(_forward, "to", to))
        warn = console.warn
        patch.setattr(console, "warn", lambda text: getattr(_forward, "to", warn)(text))
        for name in ("_will_overwrite", "_is_part", "_run_dir"):
            patch.setattr(console, name, getattr(console, name))
        patch.setattr(logging, "raiseExceptions", logging.raiseExceptions)
        patch.setattr(processes, "ChildProcess", ThreadAsProcess)
        patch.setattr(rounds, "ChildProcess", ThreadAsProcess)
        patch.setattr(case_process, "_BLOCK_SEC", 0.1)
        patch.setattr(compare, "train_in_child_process", _train_here)
        try:
            yield patch
        finally:
            for handler in set(log.handlers) - set(handlers):
                log.removeHandler(handler)
                handler.close()


def _import_main() -> types.ModuleType:
    """Imports `main.py`, which changes how its process takes a SIGINT: not so that of the tests."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module("main")
    finally:
        signal.signal(signal.SIGINT, handler)


def _forget_flags() -> None:
    """Makes the flags ready for another command line."""
    if "strategy" not in flags.FLAGS:
        flags.define_flags()
    flags.FLAGS.unparse_flags()
