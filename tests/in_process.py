"""Runs the program inside the test process, without the start-up time of TensorFlow.

`run_main` tests what a separate process does: streams, signals, exit code and end.
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

import keras
import pytest
import tensorflow as tf
from tensorflow.python.framework import config as framework_config  # To undo op determinism.

from app.commands import compare
from app.options import Config, flags
from app.performance import case_process, rounds
from app.runtime import console, processes
from app.runtime.processes import Channel, ChildProcess
from app.verification import strategies


def parse_here(*arguments) -> Config:
    """Returns the config of a command line; raises its errors."""
    return flags.parse_config(["main.py", *arguments])


def run_here(*arguments, env=None) -> subprocess.CompletedProcess:
    """Runs the program, with threads instead of child processes; asserts nothing."""
    main, argv = _import_main(), ["main.py", *map(str, arguments)]
    with (
        restored_process(),
        threads_as_processes() as patch,
        contextlib.redirect_stdout(_Captured()) as stdout,
        contextlib.redirect_stderr(_Captured()) as stderr,
    ):
        for name, value in (env or {}).items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", argv)
        try:
            code = main.run(main.parse(argv))
        except SystemExit as end:
            code = end.code
    return subprocess.CompletedProcess(argv, code, stdout.text(), stderr.text())


@contextlib.contextmanager
def restored_process():
    """Restores what a command changes in its process, which ends with it otherwise."""
    environment, log = dict(os.environ), logging.getLogger("tensorflow")
    level, is_deterministic = log.level, framework_config.is_op_determinism_enabled()
    keras_config, experimental = keras.config, tf.config.experimental
    settings = [
        (keras_config.set_image_data_format, keras_config.image_data_format()),
        (keras_config.set_floatx, keras_config.floatx()),
        (keras_config.set_dtype_policy, keras_config.dtype_policy()),
        (
            experimental.enable_tensor_float_32_execution,
            experimental.tensor_float_32_execution_enabled(),
        ),
        (
            tf.config.optimizer.set_experimental_options,
            tf.config.optimizer.get_experimental_options(),
        ),
    ]
    try:
        yield
    finally:
        close_log()
        os.environ.clear()
        os.environ.update(environment)
        log.setLevel(level)
        for restore, value in settings:
            restore(value)
        if not is_deterministic:
            framework_config.disable_op_determinism()


def close_log():
    """Ends the log and the forwarding of warnings, which a process does by ending."""
    logger = logging.getLogger("lockstep.program")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()


def run_here_ok(*arguments, **options) -> subprocess.CompletedProcess:
    """Runs the program as `run_here` does and asserts that it exits with 0."""
    result = run_here(*arguments, **options)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


class _Captured(io.TextIOWrapper):
    """A stream with an encoding, like that of a process."""

    def __init__(self):
        super().__init__(io.BytesIO(), encoding="utf-8")

    def text(self):
        self.flush()
        return self.buffer.getvalue().decode()


class ThreadAsProcess:
    """A `processes.ChildProcess` implemented by a thread."""

    def __init__(self, function, *arguments, **options):
        self._call = function, arguments
        self._to_caller, self._to_function = queue.Queue(), queue.Queue()

    def __enter__(self):
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *exception):
        self._to_function.put(None)  # Tells it to end.
        self._thread.join(60)

    def _run(self):
        function, arguments = self._call
        connection = types.SimpleNamespace(send=self._to_caller.put, recv=self._to_function.get)
        channel = Channel(connection)
        try:
            self._to_caller.put(("result", function(channel, *arguments)))
        except Exception as error:
            self._to_caller.put(("error", error))

    def send_signal(self, number):
        """Threads end on their own."""

    def send(self, message):
        self._to_function.put(message)

    def receive(self, timeout_sec=None):
        kind, value = self._to_caller.get(timeout=timeout_sec or 120)
        if kind == "error":
            raise value
        return kind, value

    result = ChildProcess.result


@contextlib.contextmanager
def calls_here(prepare):
    """Replaces `prepared_calls`; one call runs after another, as threads share Keras' seed."""
    turn = threading.Lock()
    with contextlib.ExitStack() as stack:

        def start(function, *arguments):
            def run_alone(channel, *arguments):
                with turn:
                    return function(channel, *arguments)

            return stack.enter_context(ThreadAsProcess(run_alone, *arguments))

        yield start


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
    of_thread, warn = threading.local(), console.warn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "ChildProcess", ThreadAsProcess)
        patch.setattr(rounds, "ChildProcess", ThreadAsProcess)
        patch.setattr(case_process, "BLOCK_SEC", 0.1)
        patch.setattr(strategies, "prepared_calls", calls_here)
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
