"""Runs the processes of `verify`, which record strategies and check traces, two at a time."""

import contextlib
import pathlib
from collections.abc import Callable
from typing import Any, Self

from app.config import TrainConfig, VerifyConfig
from app.data.dataset import ImageDataset
from app.devices import device_setup
from app.devices.gpus import has_device_file
from app.runtime import console
from app.runtime.fork_server import Call, ForkServer
from app.runtime.processes import ChildProcess, call_function
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

    def __init__(self, config: VerifyConfig, traces: pathlib.Path, progress: StepProgress):
        self._config, self._traces, self._progress = config, traces, progress
        self._num_steps = self._num_done = 0  # Of all processes.
        self._recordings: dict[str, Call] = {}
        self._checks: dict[str, Call] = {}
        # Two processes use the cores while one of them traces a graph. On GPUs each process needs
        # all of the memory, and undisturbed times to detect stragglers.
        uses_gpus = config.device != "cpu" and has_device_file()
        self._server = ForkServer(
            _prepare,
            config.on_one_machine(),
            max_calls=2 * len(config.strategies),
            max_running=1 if uses_gpus else 2,
            on_message=progress.message,
        )

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._server)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def record(
        self,
        name: str,
        function: Callable[..., Recorded],
        child: TrainConfig,
        more: tuple[Any, ...],
    ) -> None:
        """Starts to record a strategy: `function(send, child, num_steps, path, *more)`."""
        self._recordings[name] = self._start(
            f"recording {name}", function, child, self._config.steps, self._traces / name, *more
        )

    def recorded(self) -> dict[str, Recorded]:
        """Waits for all recordings; returns them in the order of the calls of `record`."""
        return {name: self._server.wait(call) for name, call in self._recordings.items()}

    def check(self, name: str, run: Recorded) -> None:
        """Starts to check the trace of a strategy, unless it was started before."""
        if name in self._checks:
            return
        config = self._config
        dtype = config.for_training(name, inject=None).communication_dtype
        self._checks[name] = self._start(
            f"checking every step of {name}",
            tasks.check,
            config.on_one_machine(),
            self._traces / name,
            run.syncs_batch_norm,
            dtype,
        )

    def checked(self) -> dict[str, Checked]:
        """Waits for all checks; returns strategy → result."""
        return {name: self._server.wait(call) for name, call in self._checks.items()}

    def _start(self, what: str, function: Callable[..., Any], *arguments: Any) -> Call:
        self._num_steps += self._config.steps
        self._progress.start(what, self._num_steps)
        self._progress.message(("step", self._num_done))
        return self._server.start(function, *arguments, on_message=self._take)

    def _take(self, message: tuple[str, Any]) -> None:
        """Counts the steps of all processes."""
        if message[0] == "step":
            self._num_done += 1
            message = "step", self._num_done
        self._progress.message(message)


def _prepare(send: Send, config: TrainConfig) -> dict[str, ImageDataset]:
    """Imports TensorFlow, for the forks of this process; another process loads the images."""
    console.forward_warnings(lambda text: send(("warning", text)))
    with ChildProcess(call_function, _load, config) as loading:
        device_setup.keep_freed_memory()  # A check takes 9 % less processor time.
        device_setup.import_tensorflow(config.verbosity)
        from app.training import all_reduce_self_test, fault_injection, training_spec  # noqa: F401
        from app.verification import recorder, shard_by_shard, trace_checker  # noqa: F401

        while (message := loading.receive())[0] == "message":
            send(message[1])
        return {"dataset": message[1]}


def _load(send: Send, config: TrainConfig) -> ImageDataset:
    """Loads the images in a separate process, because some sources need TensorFlow."""
    from app.training.data_loading import load_data

    console.forward_warnings(lambda text: send(("warning", text)))
    return load_data(config)
