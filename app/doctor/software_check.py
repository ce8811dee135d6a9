"""Compares Python and the installed packages with the requirements."""

import dataclasses
import importlib.metadata
import pathlib
import platform
import re
import shlex
import sys
from collections.abc import Callable

from app.devices.gpu_obstacles import CUDA_PACKAGES
from app.doctor.check import NOTE, WARNING, Check
from app.runtime.errors import DeviceError
from app.runtime.shown_command import shown_path, shown_python

REQUIREMENTS = pathlib.Path(__file__).parents[2] / "requirements.txt"
_OLDEST, _NEWEST = (3, 11), (3, 13)


def check_python(version: tuple[int, int] = sys.version_info[:2]) -> Check:
    """Checks the version of Python; `main.py` rejects versions that are too old."""
    shown = f"{platform.python_version()} ({sys.executable})"
    if _OLDEST <= version <= _NEWEST:
        return Check("Python", shown)
    return Check("Python", shown, WARNING, "needs 3.11, 3.12 or 3.13; use one of them")


def check_packages(
    requirements: pathlib.Path = REQUIREMENTS,
    find_version: Callable[[str], str] = importlib.metadata.version,
) -> list[Check]:
    """Compares the installed packages with the pinned versions.

    Args:
        requirements: a file with lines such as `numpy==2.4.6`.
        find_version: returns the version of an installed package, or raises
            `PackageNotFoundError`.

    Returns:
        One check for all packages with the pinned version, and one for each other package.
    """
    try:
        pins = read_pins(requirements.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return [Check("packages", f"{requirements.name} is not beside main.py: not compared", NOTE)]
    right, others = [], []
    for name, pinned in pins.items():
        try:
            found = find_version(name)
        except importlib.metadata.PackageNotFoundError:
            others.append(_missing(name, pinned, requirements))
            continue
        if found == pinned:
            right.append(f"{name} {found}")
        else:
            how = f"{pinned} is what this was tried with; {_pip_install(f'{name}=={pinned}')}"
            others.append(Check(name, found, WARNING, how))
    return [Check("packages", ", ".join(right) or "none as pinned"), *others]


def read_pins(text: str) -> dict[str, str]:
    """Returns name → version of each line `name==version`, without extras and markers."""
    pins = re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;#]+)", text, re.MULTILINE)
    return dict(pins)


def install_all(requirements: pathlib.Path = REQUIREMENTS) -> str:
    """Returns the command that installs all requirements."""
    return _pip_install("-r", shown_path(str(requirements)))


def _missing(name: str, pinned: str, requirements: pathlib.Path) -> Check:
    error = DeviceError(f"{name}=={pinned} is not installed; {install_all(requirements)}")
    return dataclasses.replace(Check.of_error(name, error), value="not installed")


def _pip_install(*words: str) -> str:
    return shlex.join([shown_python(), "-m", "pip", "install", *words])


def install_cuda() -> str:
    """Returns the command that installs TensorFlow's libraries for GPUs."""
    return _pip_install(CUDA_PACKAGES)
