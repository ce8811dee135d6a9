"""Runs the program of a framework with a Python interpreter that has the framework."""

import collections
import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping, Sequence
from subprocess import PIPE

from app.options import Config
from app.runtime.errors import ConfigError, DeviceError
from app.runtime.run_context import start_thread
from app.runtime.subprocesses import Subprocess, child_environment, output_of


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


_JAX = ("JAX", "jax", "jax_lenet.py")
FRAMEWORKS = {
    "torch_ddp": Framework("PyTorch", "torch", "torch_lenet.py", (), "processes"),
    "jax_jit": Framework(*_JAX, ("--mode=jit",), "num_devices", syncs_batch_norm=True),
    "jax_pmap": Framework(*_JAX, ("--mode=pmap",), "num_devices"),
}
_ROOT = pathlib.Path(__file__).parents[3]
_ENVIRONMENT = _ROOT / ".venv-bench"  # Created by `make frameworks`.
_IMPORT_TIMEOUT_SEC = 120.0


def find_interpreters(names: Sequence[str]) -> dict[str, str]:
    """Returns framework → the Python interpreter that runs it.

    `LOCKSTEP_TORCH_PYTHON` and `LOCKSTEP_JAX_PYTHON` name the interpreters; the default is the one
    that `make frameworks` installs.

    Raises:
        ConfigError: the interpreter does not exist, or cannot import the framework.
    """
    return {name: _find_interpreter(name, FRAMEWORKS[name]) for name in names}


def _find_interpreter(name: str, framework: Framework) -> str:
    variable = f"LOCKSTEP_{framework.package.upper()}_PYTHON"
    python = os.environ.get(variable) or str(_ENVIRONMENT / "bin" / "python")
    advice = f"run `make frameworks`, or set {variable} to a Python that has it"
    if not pathlib.Path(python).exists():
        raise ConfigError(
            f"--strategies={name} needs {framework.title}, and there is no {python}; {advice}"
        )
    try:
        output_of([python, "-c", f"import {framework.package}"], timeout_sec=_IMPORT_TIMEOUT_SEC)
    except OSError as error:
        raise ConfigError(
            f"--strategies={name} needs {framework.title}, which {python} cannot import; {advice}"
        ) from error
    return python


def run_program(
    name: str,
    python: str,
    config: Config,
    learning_rate: float,
    files: Mapping[str, pathlib.Path],
    *flags: str,
    num_replicas: int,
    on_line: Callable[[str], None],
) -> None:
    """Runs the program of a framework to the end of its training.

    Args:
        name: name of the framework, a key of `FRAMEWORKS`.
        python: interpreter.
        config: options of the training.
        learning_rate: learning rate of each step.
        files: flag → file that the program reads or writes.
        *flags: further flags.
        num_replicas: number of processes or devices.
        on_line: called with each line that the program prints.

    Raises:
        DeviceError: the program failed.
    """
    framework = FRAMEWORKS[name]
    command = [
        *(python, str(_ROOT / "frameworks" / framework.program), *framework.flags),
        *(f"--model={config.training.model}", f"--{framework.flag_of_replicas}={num_replicas}"),
        f"--global_batch_size={config.training.global_batch_size}",
        *(f"--learning_rate={learning_rate!r}", f"--last_batch={config.training.last_batch}"),
        *(f"--{flag}={path}" for flag, path in files.items()),
        *flags,
    ]
    process = Subprocess(
        command,
        child_environment(PYTHONUNBUFFERED="1"),
        stdout=PIPE,
        stderr=PIPE,
        start_new_session=True,
    )
    errors: collections.deque[bytes] = collections.deque(maxlen=1)  # The last line has the reason.
    reading = start_thread(errors.extend, process.stderr or ())
    try:
        for line in process.stdout or ():
            on_line(line.decode(errors="replace").rstrip())
        process.wait()
        reading.join()
    finally:
        process.end()
    if exit_code := process.exit_code:
        reason = "".join(line.decode(errors="replace") for line in errors).strip()
        reason = reason.removeprefix("error: ") or "no message"
        raise DeviceError(
            f"the program of {name} ended with exit code {exit_code}: {reason}; run it by hand, see"
            " docs/verify_scripts.md"
        )
