"""Runs the programs of other frameworks, all from the same files, and records their trainings.

A program is run by a Python interpreter that has the framework; it may not be this one.
"""

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from subprocess import PIPE
from typing import NamedTuple

import numpy as np

from app.data.dataset import ImageDataset
from app.options import Config
from app.records.files import io_errors_as
from app.runtime.errors import ConfigError, DeviceError
from app.runtime.processes import Process, output_of
from app.verification.framework_trace import convert
from app.verification.recording import Recorded, set_up
from lockstep.data import file as trace_file

_ROOT = pathlib.Path(__file__).parents[2]
_ENVIRONMENT = _ROOT / ".venv-bench"  # Created by `make frameworks`.
_IMPORT_TIMEOUT_SEC = 120.0
_STEP = re.compile(r"step (\d+)")


@dataclasses.dataclass(frozen=True)
class Framework:
    """Describes a training by a program in `frameworks/`.

    Attributes:
        title: name of the framework.
        package: the Python package that the program needs.
        program: file name of the program.
        flags: flags that select the kind of training.
        flag_of_replicas: flag for the number of replicas.
        syncs_batch_norm: whether BatchNorm normalises over the whole batch.
    """

    title: str
    package: str
    program: str
    flags: tuple[str, ...]
    flag_of_replicas: str
    syncs_batch_norm: bool = False

    def device_names(self, num_replicas: int) -> list[str]:
        """Returns a name for the device of each replica."""
        return [f"{self.title} {replica}" for replica in range(num_replicas)]


_JAX = ("JAX", "jax", "jax_lenet.py")
FRAMEWORKS = {
    "torch_ddp": Framework("PyTorch", "torch", "torch_lenet.py", (), "processes"),
    "jax_jit": Framework(*_JAX, ("--mode=jit",), "num_devices", syncs_batch_norm=True),
    "jax_pmap": Framework(*_JAX, ("--mode=pmap",), "num_devices"),
}


class TrainingFiles(NamedTuple):
    """The files from which a program trains, and what is known of the training.

    Attributes:
        start: initial weights and statistics, by Keras name.
        batches: images, labels and the order of the examples of each epoch.
        learning_rate: peak learning rate.
        num_epochs: number of epochs with an order of the examples.
    """

    start: pathlib.Path
    batches: pathlib.Path
    learning_rate: float
    num_epochs: int


@contextlib.contextmanager
def temporary_folder(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Creates a folder and its parents, and removes the folder at the end of the block.

    Raises:
        DiskFullError, OutputError: the folder cannot be created.
    """
    with io_errors_as(path):
        path.mkdir(parents=True)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


def write_training_files(
    send: Callable[[tuple], None], config: Config, num_steps: int | None, folder: pathlib.Path,
    data: ImageDataset | None = None,
) -> TrainingFiles:  # fmt: skip
    """Writes initial weights, images and orders of a training; runs in a separate process.

    Args:
        send: called with `("warning", text)`.
        config: options of the training.
        num_steps: number of steps to train; None for all epochs.
        folder: output folder.
        data: the data of the training; None to load it.
    """
    _, spec = set_up(send, config, data)
    from app.data.input_pipeline import epoch_order  # Imports TensorFlow.

    model, dataset, num_epochs = spec.build_model(), spec.dataset, config.training.epochs
    if num_steps is not None:
        num_epochs = -(-num_steps // spec.steps_per_epoch)
    seed = config.training.seed
    order = [epoch_order(dataset.num_train_examples, seed, e) for e in range(num_epochs)]
    start, batches = folder / "start.npz", folder / "batches.npz"
    np.savez(start, **{v.path: v.numpy() for v in model.variables if v.dtype == "float32"})
    np.savez(
        batches,
        images=dataset.train_images,
        labels=dataset.train_labels,
        order=np.stack(order),
        test_images=dataset.test_images,
        test_labels=dataset.test_labels,
    )
    return TrainingFiles(start, batches, spec.learning_rate, num_epochs)


def find_interpreters(names: Sequence[str]) -> dict[str, str]:
    """Returns framework → the Python interpreter that runs it, for those among the names.

    `LOCKSTEP_TORCH_PYTHON` and `LOCKSTEP_JAX_PYTHON` name the interpreters; the default is the one
    that `make frameworks` installs.

    Raises:
        ConfigError: the interpreter does not exist, or cannot import the framework.
    """
    return {name: _find_interpreter(name, FRAMEWORKS[name]) for name in names if name in FRAMEWORKS}


def _find_interpreter(name: str, framework: Framework) -> str:
    variable = f"LOCKSTEP_{framework.package.upper()}_PYTHON"
    python = os.environ.get(variable) or str(_ENVIRONMENT / "bin" / "python")
    needs = f"--strategies={name} needs {framework.title}"
    advice = f"run `make frameworks`, or set {variable} to a Python that has it"
    if not pathlib.Path(python).exists():
        raise ConfigError(f"{needs}, and there is no {python}; {advice}")
    try:
        command = [python, "-c", f"import {framework.package}"]
        exit_code, _ = output_of(command, timeout_sec=_IMPORT_TIMEOUT_SEC)
    except OSError:
        exit_code = 1
    if exit_code:
        raise ConfigError(f"{needs}, which {python} cannot import; {advice}")
    return python


def run_program(
    name: str,
    python: str,
    config: Config,
    files: TrainingFiles,
    written: Mapping[str, pathlib.Path],
    *flags: str,
    on_line: Callable[[str], None],
) -> None:
    """Runs the program of a framework to the end of its training.

    Args:
        name: name of the framework, a key of `FRAMEWORKS`.
        python: interpreter.
        config: options of the command.
        files: files that the program trains from.
        written: flag → file that the program writes.
        *flags: further flags.
        on_line: called with each line that the program prints.

    Raises:
        DeviceError: the program failed.
    """
    command = [python, *_program_words(FRAMEWORKS[name], config, files, written), *flags]
    with Process(
        command,
        environment={"PYTHONUNBUFFERED": "1"},
        keeps_errors=True,
        stdout=PIPE,
        start_new_session=True,
    ) as process:
        for line in process.stdout or ():
            on_line(line.decode(errors="replace").rstrip())
        process.wait()
    if exit_code := process.exit_code:
        reason = process.last_line.removeprefix("error: ") or "no message"
        raise DeviceError(
            f"the program of {name} ended with exit code {exit_code}: {reason}; run it by hand, see"
            " docs/verify_scripts.md"
        )


def _program_words(
    framework: Framework, config: Config, files: TrainingFiles, written: Mapping[str, pathlib.Path]
) -> list[str]:
    """Returns the path of a program, and the flags of the training."""
    training, paths = config.training, {"start": files.start, "batches": files.batches, **written}
    return [
        *(str(_ROOT / "frameworks" / framework.program), *framework.flags),
        f"--model={training.model}",
        f"--{framework.flag_of_replicas}={config.num_framework_replicas}",
        f"--global_batch_size={training.global_batch_size}",
        f"--learning_rate={files.learning_rate!r}",
        f"--last_batch={training.last_batch}",
        f"--epochs={files.num_epochs}",
        *(f"--{flag}={path}" for flag, path in paths.items()),
    ]


def record_framework(
    name: str,
    python: str,
    config: Config,
    files: TrainingFiles,
    path: pathlib.Path,
    on_message: Callable[[tuple], None],
) -> Recorded:
    """Trains with a framework and writes the trace of the steps, with the names of Keras.

    Args:
        name: name of the framework, a key of `FRAMEWORKS`.
        python: interpreter.
        config: options of `verify`.
        files: files that the program trains from.
        path: file of the trace.
        on_message: called with `("step", n)`.

    Raises:
        DataError: the recording of a step is incomplete.
        DeviceError: the program failed.
    """

    def on_line(line: str) -> None:
        if match := _STEP.fullmatch(line):
            on_message(("step", int(match[1])))

    num_steps, framework = config.verification.steps, FRAMEWORKS[name]
    script_path = files.start.with_name(f"{name}.npz")
    run_program(
        name, python, config, files, {"trace": script_path},
        f"--num_steps={num_steps}", f"--recorded_steps={num_steps}", on_line=on_line,
    )  # fmt: skip
    script = trace_file.load(script_path)
    with np.load(files.start) as start:
        has_batch_norm = any("/moving_" in name for name in start)
        syncs_batch_norm = framework.syncs_batch_norm and has_batch_norm
        convert(script, path, start, syncs_batch_norm=syncs_batch_norm)
    num_replicas = config.num_framework_replicas
    return Recorded(framework.device_names(num_replicas), num_replicas > 1)
