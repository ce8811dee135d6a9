"""Records the training of another framework as the trace of a strategy."""

import dataclasses
import pathlib
import re
from collections.abc import Callable, Mapping

import numpy as np

from app.options import Config
from app.options.rules import num_framework_replicas
from app.records.files import io_errors_as
from app.runtime.processes import call_in_child_process
from app.verification.frameworks.framework_files import TrainingFiles, write_training_files
from app.verification.frameworks.framework_program import FRAMEWORKS, run_program
from app.verification.frameworks.framework_trace import FrameworkTrace
from app.verification.recorded import Recorded
from lockstep import trace_file

_STEP = re.compile(r"step (\d+)")


class FrameworkRecorder:
    """Records trainings of frameworks, all from the same files.

    Args:
        config: options of the command.
        interpreters: framework → the Python interpreter that runs it.
        folder: folder for temporary files of the recording.
    """

    def __init__(self, config: Config, interpreters: Mapping[str, str], folder: pathlib.Path):
        self._config, self._interpreters, self._folder = config, interpreters, folder
        self._files: TrainingFiles | None = None

    def record(
        self, name: str, path: pathlib.Path, on_message: Callable[[tuple], None]
    ) -> Recorded:
        """Trains with a framework and writes the trace of the steps to `path`.

        Args:
            name: a key of `FRAMEWORKS`.
            path: directory of the trace.
            on_message: called with `("step", n)` and `("warning", text)`.

        Raises:
            DataError: the recording of a step is incomplete.
            DeviceError: the program failed.
        """
        config = self._config.for_training(name, inject=None)
        if self._files is None:
            self._files = call_in_child_process(
                write_training_files,
                config,
                self._config.verification.steps,
                self._folder,
                on_message=on_message,
            )
        return _record(
            name,
            self._interpreters[name],
            config,
            self._config.verification.steps,
            self._files,
            path,
            num_replicas=num_framework_replicas(self._config),
            on_message=on_message,
        )

    def remove_files(self) -> None:
        """Removes the files that the frameworks were trained from; keeps the traces."""
        if self._files is not None:
            for path in (self._files.start, self._files.batches):
                with io_errors_as(path):
                    path.unlink()
            self._files = None


def _record(
    name: str,
    python: str,
    config: Config,
    num_steps: int,
    files: TrainingFiles,
    path: pathlib.Path,
    *,
    num_replicas: int,
    on_message: Callable[[tuple], None],
) -> Recorded:
    def on_line(line: str) -> None:
        if match := _STEP.fullmatch(line):
            on_message(("step", int(match[1])))

    script_path = path.with_name(f"{path.stem}-script.npz")
    run_program(
        name,
        python,
        config,
        files.recorded.learning_rate,
        {"start": files.start, "batches": files.batches, "trace": script_path},
        f"--epochs={-(-num_steps // files.steps_per_epoch)}",
        *(f"--num_steps={num_steps}", f"--recorded_steps={num_steps}"),
        num_replicas=num_replicas,
        on_line=on_line,
    )
    script = trace_file.load(script_path)
    with np.load(files.start) as start:
        names = list(start)
    with np.load(files.batches) as arrays:
        images, labels = arrays["images"], arrays["labels"]
    framework, has_batch_norm = FRAMEWORKS[name], files.recorded.has_batch_norm
    syncs = framework.syncs_batch_norm and has_batch_norm
    about = FrameworkTrace(script, names, images, labels, syncs_batch_norm=syncs).save(path)
    for file in path.parent.glob(f"{path.stem}-script*.npz"):
        with io_errors_as(file):
            file.unlink()
    return dataclasses.replace(
        files.recorded,
        about=about,
        devices=[f"{framework.title} {i}" for i in range(num_replicas)],
        simulated_devices=num_replicas > 1,
        versions={**files.recorded.versions, **script.about.versions},
    )
