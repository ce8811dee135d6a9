"""Runs the processes of `verify`, which record strategies and check traces, two at a time."""

import contextlib
import contextvars
import pathlib
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Self

from app.data.dataset import ImageDataset
from app.devices.gpus import has_device_file
from app.options import Config
from app.options.names import SINGLE
from app.runtime import console
from app.runtime.processes import (
    ChildProcess,
    call_function,
    call_in_child_process,
    start_tensorflow_server,
)
from app.runtime.progress_bar import StepProgress
from app.verification import tasks
from app.verification.recorded import Checked, Recorded
from app.verification.tasks import Send


class StrategyProcesses:
    """Records strategies and checks their traces; a context manager that ends all processes.

    Args:
        config: options of the command.
        traces: directory of the traces, one per strategy.
        progress: shows the steps of all processes together.
    """

    def __init__(self, config: Config, traces: pathlib.Path, progress: StepProgress):
        self._config, self._traces, self._progress = config, traces, progress
        self._num_steps = self._num_done = 0  # Of all processes.
        self._recordings: dict[str, Future] = {}
        self._checks: dict[str, Future] = {}
        self._lock = threading.Lock()
        # The messages of the process that imports TensorFlow cannot be shown.
        self._has_server = config.output.verbosity < 0
        # Two processes use the cores while one of them traces a graph. On GPUs each process needs
        # all of the memory, and undisturbed times to detect stragglers.
        uses_gpus = config.distribution.device != "cpu" and has_device_file()
        self._threads = ThreadPoolExecutor(1 if uses_gpus else 2)
        self._processes = contextlib.ExitStack()  # Those that still run, on an error.

    def __enter__(self) -> Self:
        if self._has_server:
            start_tensorflow_server()  # Before the threads that use it.
        # In a separate process, because some sources need TensorFlow.
        self._dataset = call_in_child_process(
            _load, self._config.on_one_machine(), on_message=self._progress.message
        )
        return self

    def __exit__(self, *exception: object) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._processes.close()
        self._threads.shutdown()

    def record(self, name: str, child: Config, shard_weights: tuple[int, ...]) -> None:
        """Starts to record a strategy; see `tasks.record`."""
        self._recordings[name] = self._start(
            f"recording {name}",
            tasks.record,
            child,
            self._config.verification.steps,
            self._traces / f"{name}.npz",
            shard_weights,
        )

    def recorded(self) -> dict[str, Recorded]:
        """Waits for all recordings; returns them in the order of the calls of `record`."""
        return {name: call.result() for name, call in self._recordings.items()}

    def check(self, name: str, path: pathlib.Path) -> None:
        """Starts to check the trace of a strategy, unless it was started before."""
        if name not in self._checks:
            # With as many threads as in the training, most steps are bitwise those of the oracle.
            alone = self._config.for_training(SINGLE, inject=None)
            child = alone if name == SINGLE else self._config.on_one_machine()
            what = f"checking every step of {name}"
            self._checks[name] = self._start(what, tasks.check, child, path, name)

    def checked(self) -> dict[str, Checked]:
        """Waits for all checks; returns strategy → result."""
        return {name: call.result() for name, call in self._checks.items()}

    def _start(self, what: str, function: Callable[..., Any], *arguments: Any) -> Future:
        with self._lock:
            self._num_steps += self._config.verification.steps
            self._progress.start(what, self._num_steps)
            self._progress.message(("step", self._num_done))
        run = contextvars.copy_context().run
        return self._threads.submit(run, self._call, function, *arguments)

    def _call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Runs in a thread, which waits for its process."""
        process = ChildProcess(
            call_function,
            _with_dataset,
            function,
            self._dataset,
            arguments,
            has_tensorflow=self._has_server,
        )
        with process:
            self._processes.callback(process.signal, signal.SIGKILL)
            while (message := process.receive())[0] == "message":
                self._take(message[1])
        return message[1]

    def _take(self, message: tuple[str, Any]) -> None:
        """Counts the steps of all processes."""
        with self._lock:
            if message[0] == "step":
                self._num_done += 1
                message = "step", self._num_done
            self._progress.message(message)


def _with_dataset(
    send: Send, function: Callable[..., Any], dataset: ImageDataset, arguments: tuple[Any, ...]
) -> Any:
    return function(send, *arguments, dataset=dataset)


def _load(send: Send, config: Config) -> ImageDataset:
    from app.training.data_loading import load_data

    console.forward_warnings(lambda text: send(("warning", text)))
    return load_data(config)
