"""Checks packages, processor, data and output directory, without TensorFlow."""

import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import re
import sys
import tempfile
import textwrap

from app.data.data_sources import (
    DOWNLOAD_URL,
    HOW_TO_GET,
    PREPARED,
    TO_DOWNLOAD,
    DataMissingError,
    check_connection,
    find_data_source,
)
from app.data.fashion_mnist import load_fashion_mnist
from app.devices.device_setup import num_cores
from app.options import Config
from app.records.run_directory import check_not_foreign, named_path
from app.runtime.errors import (
    DeviceError,
    DiskFullError,
    LockstepError,
    OutputError,
    reason_of,
)
from app.runtime.shown_command import shown_path, shown_python

REQUIREMENTS = pathlib.Path(__file__).parents[2] / "requirements.txt"
OK, NOTE, WARNING, ERROR = "✓", "·", "!", "✗"
_CONNECT_TIMEOUT_SEC = 1.0
_LEAST_MEMORY_BYTES = 2 << 30  # TensorFlow, the images and LeNet's replicas.
# Three checkpoints, of weights and momentum in float32.
_LENET_BYTES, _RESNET_BYTES = 3 << 20, 270 << 20


@dataclasses.dataclass(frozen=True)
class Check:
    """One line of the output of `doctor`.

    Attributes:
        what: what was checked.
        value: what was found.
        mark: `OK`, `NOTE` for information, `WARNING` or `ERROR`.
        advice: what to do, if something is wrong.
        error: for `ERROR`, the error of a training.
    """

    what: str
    value: str
    mark: str = OK
    advice: str = ""
    error: LockstepError | None = None

    @classmethod
    def of_error(cls, what: str, error: LockstepError) -> "Check":
        """Returns the check for an error that a training would exit with."""
        return cls(what, error.problem, ERROR, error.advice, error)

    def text(self) -> str:
        """Returns the check in lines of at most 100 columns."""
        told = f"{self.value} → {self.advice}" if self.advice else self.value
        return textwrap.fill(
            f"  {self.mark} {self.what:<14} {told}",
            width=100, subsequent_indent=" " * 19, break_long_words=False, break_on_hyphens=False,
        )  # fmt: skip


def check_software(requirements: pathlib.Path = REQUIREMENTS) -> list[Check]:
    """Compares Python and the installed packages with the pinned versions."""
    fits = (3, 11) <= sys.version_info[:2] <= (3, 13)
    shown = f"{platform.python_version()} ({sys.executable})"
    python = Check("Python", shown, OK if fits else WARNING, "" if fits else "use 3.11 to 3.13")
    try:
        text = requirements.read_text(encoding="utf-8")
    except OSError:
        return [python, Check("packages", f"{requirements.name} is missing: not compared", NOTE)]
    pins = dict(re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;#]+)", text, re.MULTILINE))
    found = {name: _installed_version(name) for name in pins}
    right = [f"{name} {pinned}" for name, pinned in pins.items() if found[name] == pinned]
    checks = [python, Check("packages", ", ".join(right))]
    for name, pinned in pins.items():
        if found[name] is None:
            error = DeviceError(f"{name}=={pinned} is not installed; {install_all(requirements)}")
            checks.append(Check.of_error(name, error))
        elif found[name] != pinned:
            advice = f"tried with {pinned}: {install_all(requirements)}"
            checks.append(Check(name, str(found[name]), WARNING, advice))
    return checks


def _installed_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def install_all(requirements: pathlib.Path = REQUIREMENTS) -> str:
    """Returns the command that installs all requirements."""
    return f"{shown_python()} -m pip install -r {shown_path(str(requirements))}"


def check_processor() -> Check:
    """Reports cores and memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    shown = f"{platform.machine()}, {num_cores()} cores, {memory / 2**30:.1f} GiB of memory"
    if memory < _LEAST_MEMORY_BYTES:
        return Check("processor", shown, WARNING, "LeNet needs 2 GiB; use a larger machine")
    return Check("processor", shown)


def check_data(config: Config) -> Check:
    """Finds the images of `--dataset` and verifies them as a training does; downloads nothing."""
    if config.data.dataset == "synthetic":
        return Check("Fashion-MNIST", "not needed: --dataset=synthetic generates images", NOTE)
    try:
        return _check_source(config)
    except DataMissingError as error:
        if config.data.data_dir or config.data.dataset == "fashion_mnist":
            return Check.of_error("Fashion-MNIST", error)
        value = f"{error.problem}: a training uses GENERATED images in its place"
        return Check("Fashion-MNIST", value, WARNING, error.advice)
    except LockstepError as error:
        return Check.of_error("Fashion-MNIST", error)


def _check_source(config: Config) -> Check:
    source = find_data_source(config.data.data_dir)
    shown = f"{source.folder} ({source.named_by})"
    if source.kind == TO_DOWNLOAD:
        try:
            check_connection(DOWNLOAD_URL, _CONNECT_TIMEOUT_SEC)
        except OSError as error:
            raise DataMissingError(
                f"it is in none of {', '.join(source.looked)} and cannot be downloaded"
                f" ({reason_of(error)}); {HOW_TO_GET}"
            ) from error
        value = f"not here yet: the first training downloads 30 MB from {DOWNLOAD_URL}"
        return Check("Fashion-MNIST", value)
    if source.kind == PREPARED:
        return Check("Fashion-MNIST", f"{shown}: prepared by TFDS; a training verifies it", NOTE)
    dataset = load_fashion_mnist(
        config.data.data_dir, allow_unverified=config.data.allow_unverified_data
    )
    if dataset.name == "unverified":
        value = f"{shown}: UNVERIFIED images, as --allow_unverified_data asks"
        return Check("Fashion-MNIST", value, WARNING, "accuracies are not those of Fashion-MNIST")
    return Check("Fashion-MNIST", f"{shown}: the four files, SHA-256 verified")


def check_output(config: Config) -> Check:
    """Checks that a run's directory can be created, and its disk's space; leaves no file."""
    name = config.output.out or "runs"
    try:
        path = named_path(name).absolute()
        existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
        if config.output.out and path.is_dir():
            check_not_foreign(path)
        # Permissions do not show that a file system is read-only.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"1")
        disk = os.statvfs(existing)
    except LockstepError as error:
        return Check.of_error("output", error)
    except OSError as error:
        told = f"--out={name}: {reason_of(error)}; choose another directory with --out"
        return Check.of_error("output", OutputError(told))
    free = disk.f_bavail * disk.f_frsize
    shown = f"{name}: can be written, {free / 1e9:,.1f} GB free"
    if free < _LENET_BYTES:
        told = f"{name}: {free:,} bytes are free, but checkpoints of LeNet take {_LENET_BYTES:,}"
        full = DiskFullError(f"{told}; make room, or choose another directory with --out")
        return Check.of_error("output", full)
    if free < _RESNET_BYTES:
        advice = f"checkpoints of ResNet-18 take {_RESNET_BYTES:,} bytes; LeNet has room"
        return Check("output", shown, WARNING, advice)
    return Check("output", shown)
