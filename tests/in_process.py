"""Runs the program inside the test process, without the start-up time of TensorFlow.

`run_main` tests what a separate process does: streams, signals, exit code and end.
"""

import contextlib
import importlib
import io
import logging
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import types

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as framework_config  # To undo op determinism.

from app import children, console
from app.children import Channel
from app.commands import compare
from app.options.table import COMMANDS
from tests.conftest import assert_ok


def run_here(*arguments, env=None) -> subprocess.CompletedProcess:
    """Runs the program, with threads instead of child processes; asserts nothing."""
    main, argv = _import_main(), ["main.py", *map(str, arguments)]
    with (
        restored_process(),
        threads_as_processes() as patch,
        contextlib.redirect_stdout(Captured()) as stdout,
        contextlib.redirect_stderr(Captured()) as stderr,
    ):
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", argv)
        try:
            code = main.run(main.parse(argv))
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(argv, code, stdout.text(), stderr.text())


def run_here_ok(*arguments, **options) -> subprocess.CompletedProcess:
    """Runs the program as `run_here` does and asserts that it exits with 0."""
    return assert_ok(run_here(*arguments, **options))


@contextlib.contextmanager
def restored_process():
    """Restores what a command changes in its process, which ends with it otherwise."""
    environment, log = dict(os.environ), logging.getLogger("tensorflow")
    level, is_deterministic = log.level, framework_config.is_op_determinism_enabled()
    policy, optimizer = keras.config.dtype_policy(), tf.config.optimizer
    experimental = optimizer.get_experimental_options()
    try:
        yield
    finally:
        close_log()
        os.environ.clear()
        os.environ.update(environment)
        log.setLevel(level)
        keras.config.set_dtype_policy(policy)
        optimizer.set_experimental_options(experimental)
        if not is_deterministic:
            framework_config.disable_op_determinism()


def close_log():
    """Ends the log and the forwarding of warnings, which a process does by ending."""
    logger = logging.getLogger("lockstep.program")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


class Captured(io.TextIOWrapper):
    """A stream with an encoding, like that of a process."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8")

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode()


class ThreadAsProcess(children.Child):
    """A child process implemented by a thread.

    Threads share Keras' seed: each runs alone, until it waits for a message.
    """

    turn = threading.Lock()

    def __init__(self, function, *arguments, **options):
        self.connection, self._theirs = multiprocessing.Pipe()
        self._thread = threading.Thread(target=self._run, args=(function, arguments), daemon=True)
        self._thread.start()

    def __exit__(self, *exception):
        with contextlib.suppress(OSError):
            self.connection.send(None)  # Tells it to end.
        self._thread.join(60)

    def _run(self, function, arguments):
        def wait_for_message():
            self.turn.release()
            try:
                return self._theirs.recv()
            finally:
                self.turn.acquire()

        connection = types.SimpleNamespace(send=self._theirs.send, recv=wait_for_message)
        with self.turn, self._theirs:
            try:
                answer = "result", function(Channel(connection), *arguments)
            except Exception as error:
                answer = "error", error
            self._theirs.send(answer)

    def receive(self):
        assert self.connection.poll(120)
        return super().receive()


def train_here(words) -> int:
    """Replaces `train_in_child_process`."""
    result = run_here(*words)
    sys.stdout.write(result.stdout)
    sys.stderr.write(result.stderr)
    return result.returncode


@contextlib.contextmanager
def threads_as_processes():
    """Replaces the child processes of a command with threads of this process."""
    tf.config.list_logical_devices()  # Fixes the number of devices before a command does.
    for command in COMMANDS:
        importlib.import_module(f"app.commands.{command}")
    modules = [m for n, m in sys.modules.items() if n.split(".")[0] == "app"]
    of_thread, warn, child = threading.local(), console.warn, children.Child
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            if getattr(module, "Child", None) is child:
                patch.setattr(module, "Child", ThreadAsProcess)
        patch.setattr(compare, "train_in_child_process", train_here)
        # Each process would forward its own warnings.
        patch.setattr(console, "forward_warnings", lambda to: setattr(of_thread, "warn", to))
        patch.setattr(console, "warn", lambda text: getattr(of_thread, "warn", warn)(text))
        yield patch


def _import_main() -> types.ModuleType:
    """Imports `main.py`, and restores the SIGINT handler of the tests."""
    handler = signal.getsignal(signal.SIGINT)
    try:
        return importlib.import_module("main")
    finally:
        signal.signal(signal.SIGINT, handler)
