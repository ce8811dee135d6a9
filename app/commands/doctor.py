"""`doctor`: checks the machine, the data and the all-reduces, and prints the command to run."""

import importlib.metadata
import os
import pathlib
import platform
import re
import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from app import console
from app.children import Channel, Child, output_of
from app.data import fashion_mnist
from app.errors import DeviceError, LockstepError, OutputError, reason_of
from app.options import Config
from app.records.history import TIMING_CAVEAT
from app.records.run_directory import named_path

REQUIREMENTS = pathlib.Path(__file__).parents[2] / "requirements.txt"
OK, WARNING, ERROR = "✓", "!", "✗"
TIMEOUT_SEC = 90.0  # For TensorFlow's import, for the devices, and for each all-reduce.

# The mark and what was found, or the error that a training would exit with.
Finding = tuple[str, str] | LockstepError


def run(config: Config) -> None:
    """Prints each check as soon as it is done, and the command to run; raises the first error."""
    found: dict[str, Finding] = {}
    for name, finding in examine(config):
        found[name] = finding
        mark, text = (ERROR, str(finding)) if isinstance(finding, LockstepError) else finding
        console.say(textwrap.fill(
            f"  {mark} {name:<14} {text}",
            width=100, subsequent_indent=" " * 19, break_long_words=False, break_on_hyphens=False,
        ))  # fmt: skip
    console.say(f"What to run\n{what_to_run(config, found)}")
    for finding in found.values():
        if isinstance(finding, LockstepError):
            raise finding


def examine(config: Config) -> Iterator[tuple[str, Finding]]:
    """Yields the name and the finding of each check."""
    checks = {"versions": check_versions, "machine": check_machine}
    checks |= {"Fashion-MNIST": check_data, "output": check_output}
    for name, check in checks.items():
        try:
            yield name, check(config)
        except LockstepError as error:
            yield name, error
    # In another process, which may hang or crash; the check that does is the last.
    with Child(examine_tensorflow, config) as child:
        for name in ("TensorFlow", "devices", *_replicated(config)):
            try:
                if not child.connection.poll(TIMEOUT_SEC):
                    raise DeviceError(
                        f"{name} did not end within {TIMEOUT_SEC:g} s; see whether nvidia-smi"
                        " answers, and with NCCL_DEBUG=INFO where NCCL waits, or use"
                        " --all_reduce=reduce_to_one"
                    )
                kind, finding = child.receive()
            except (LockstepError, RuntimeError) as error:
                yield name, _reported(name, error)
                return
            if kind == "result":  # There is one device.
                return
            yield name, finding


def _reported(name: str, error: Exception) -> LockstepError:
    """Returns the error to report for an exception; TensorFlow and NCCL raise various."""
    if isinstance(error, LockstepError):
        return error
    advice = "set TF_CPP_MIN_LOG_LEVEL=0 to see why, or use --all_reduce=reduce_to_one"
    return DeviceError(f"{name} failed ({reason_of(error)}); {advice}")


def check_versions(config: Config) -> Finding:
    """Compares Python and the installed packages with the pinned versions."""
    shown, others = [f"Python {platform.python_version()}"], list[str]()
    pins = re.findall(r"^([\w.-]+)==(\S+)", REQUIREMENTS.read_text(encoding="utf-8"), re.MULTILINE)
    for name, pinned in pins:
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            raise DeviceError(f"{name}=={pinned} is not installed; {install_all()}") from None
        shown.append(f"{name} {version}")
        if version != pinned:
            others.append(f"{name} {pinned}")
    if not others:
        return OK, ", ".join(shown)
    return WARNING, f"{', '.join(shown)}; tested with {', '.join(others)}: {install_all()}"


def install_all() -> str:
    """Returns the command that installs all requirements."""
    return f"{console.shown_python()} -m pip install -r {REQUIREMENTS}"


def check_machine(config: Config) -> Finding:
    """Reports cores, memory, and what `nvidia-smi` answers."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    fields = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        code, text = output_of(["nvidia-smi", *fields], timeout_sec=10)
        gpus = "; ".join(text.split("\n")).strip("; ") or f"exit code {code}"
    except OSError as error:
        gpus = reason_of(error)
    cores = len(os.sched_getaffinity(0))
    return OK, f"{platform.machine()}, {cores} cores, {memory:.1f} GiB; nvidia-smi: {gpus}"


def check_data(config: Config) -> Finding:
    """Finds the images of `--dataset` and verifies them as a training does; downloads nothing."""
    if config.data.dataset == "synthetic":
        return OK, "not needed: --dataset=synthetic generates images"
    try:
        folder, paths = fashion_mnist.find_files(config.data.data_dir)
    except fashion_mnist.DataMissingError as error:
        if config.data.dataset == "fashion_mnist" or config.data.data_dir:
            raise
        return WARNING, f"a training uses GENERATED images in its place: {error}"
    if paths:
        fashion_mnist.load_fashion_mnist(config.data.data_dir)
        return OK, f"{folder}: the four files, SHA-256 verified"
    if fashion_mnist.is_prepared(folder):
        return OK, f"{folder}: prepared by TFDS; a training verifies it"
    return OK, f"not here yet: the first training downloads 30 MB from {fashion_mnist.DOWNLOAD_URL}"


def check_output(config: Config) -> Finding:
    """Checks that a run's directory can be created, and reports free space; leaves no file."""
    name = config.output.out or "runs"
    try:
        path = named_path(name).absolute()
        existing = next(place for place in (path, *path.parents) if os.path.lexists(place))
        # Permissions do not show that a file system is read-only.
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(b"1")
        free = shutil.disk_usage(existing).free
    except OSError as error:
        raise OutputError(
            f"--out={name}: {reason_of(error)}; choose another directory with --out"
        ) from error
    return OK, f"{name}: can be written, {free / 1e9:,.1f} GB free"


def examine_tensorflow(channel: Channel, config: Config) -> None:
    """Sends the findings about TensorFlow, the devices, and each all-reduce between them."""
    from app.devices import setup
    from app.devices.import_tf import import_tensorflow

    tf = import_tensorflow()
    built = "for" if tf.sysconfig.get_build_info()["is_cuda_build"] else "without"
    num_gpus = console.count(len(tf.config.list_physical_devices("GPU")), "GPU")
    channel.send((OK, f"{tf.__version__}, built {built} CUDA, sees {num_gpus}"))
    devices = setup.set_up(config.for_training("manual", all_reduce="auto"))
    simulated = f" ({TIMING_CAVEAT})" if devices.simulated else ""
    channel.send((OK, ", ".join(devices.names) + simulated))
    if len(devices.names) == 1:
        return
    from app.training.build import build_strategy
    from app.training.checks import check_all_reduce

    for name in _replicated(config):
        try:
            strategy = build_strategy(config.for_training(name), devices)
            check_all_reduce(strategy)
            channel.send((OK, f"all-reduce {strategy.algorithm} adds every replica once"))
        except Exception as error:
            channel.send(_reported(f"the all-reduce of {name}", error))


def _replicated(config: Config) -> list[str]:
    return [name for name in config.strategies if name != "single"]


def what_to_run(config: Config, found: Mapping[str, Finding]) -> str:
    """Returns a training that works as printed, with the options of `doctor` that work."""
    works = {name for name, finding in found.items() if not isinstance(finding, LockstepError)}
    if not works >= {"versions", "TensorFlow"}:
        return install_all()
    options: dict[str, Any] = {"recipe": "fast", "epochs": 1}
    if "devices" not in works:
        options["device"] = "cpu"
    if "Fashion-MNIST" not in works:
        options |= {"dataset": "synthetic", "data_dir": None}
    strategy = next((name for name in config.strategies if name in works), "single")
    words = config.for_training(strategy, **options).flags()
    out = config.output.out if "output" in works else f"{tempfile.gettempdir()}/lockstep-first"
    return console.shown_command([*words, f"--out={out}"] if out else words)
