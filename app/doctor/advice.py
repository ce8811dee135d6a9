"""Chooses the command to run on this machine."""

import tempfile
from collections.abc import Sequence

from app.config import DoctorConfig
from app.doctor.check import Check
from app.doctor.examination import DevicesSeen, Findings, SelfTestResult
from app.doctor.software_check import install_all, install_cuda
from app.runtime.shown_command import shown_command


def what_to_run(
    config: DoctorConfig,
    findings: Findings,
    *,
    software: Sequence[Check],
    data: Sequence[Check],
    output: Check,
) -> str:
    """Returns a command that works as printed: a training, or a step that has to come first.

    Args:
        config: flags of `doctor`; usable ones become flags of the training.
        findings: results for TensorFlow, devices and the all-reduce.
        software: checks of packages.
        data: checks of data.
        output: check of the output directory.
    """
    if findings.tensorflow is None or any(check.exit_code for check in software):
        return install_all()
    if _lacks_libraries_alone(findings):
        return install_cuda()
    asked, seen = config.num_devices_asked, findings.seen
    if findings.devices is None and seen and 0 < len(seen.gpus) < (asked or 0):
        return shown_command(["doctor", f"--num_gpus={len(seen.gpus)}"])
    has_data = not any(check.exit_code for check in data)
    words = [
        *_devices(config, findings),
        *_length(findings.devices),
        *(_data(config) if has_data else ["--dataset=synthetic"]),
        *_output(config, output),
    ]
    return shown_command(words)


def _lacks_libraries_alone(findings: Findings) -> bool:
    """Returns whether only missing libraries keep TensorFlow from a GPU of the driver."""
    seen, devices = findings.seen, findings.devices
    return bool(seen and seen.gpus and seen.missing and not (devices and devices.num_gpus))


def _devices(config: DoctorConfig, findings: Findings) -> list[str]:
    """Returns the flags of a strategy whose all-reduce works, on the available devices."""
    devices = findings.devices
    if devices is None:  # Requested devices are missing: use as many replicas on CPU.
        return ["--device=cpu", *_count("num_devices", config.num_devices or config.num_gpus)]
    number, on_gpus = len(devices.names), "GPU" in devices.names[0]
    on_cpu = [] if on_gpus or config.device != "cpu" else ["--device=cpu"]
    if number == 1:
        return ["--strategy=single", *on_cpu]
    working = [
        name for name, result in findings.self_tests.items() if isinstance(result, SelfTestResult)
    ]
    if not working:
        return ["--strategy=single", *on_cpu]
    strategy = "mirrored" if "mirrored" in working and on_gpus else working[0]
    flags = [f"--strategy={strategy}"]
    if config.all_reduce != "auto":
        flags.append(f"--all_reduce={config.all_reduce}")
    if on_gpus:
        return [*flags, f"--num_gpus={number}"]
    asked = config.num_devices or config.num_gpus
    return [*flags, *on_cpu, *_count("num_devices", asked)]


def _count(flag: str, number: int | None) -> list[str]:
    return [f"--{flag}={number}"] if number else []


def _length(devices: DevicesSeen | None) -> list[str]:
    """Returns the flags of a training that takes about a minute on a CPU."""
    on_gpus = devices and "GPU" in devices.names[0]
    return ["--recipe=fast", f"--epochs={10 if on_gpus else 1}"]


def _data(config: DoctorConfig) -> list[str]:
    flags = [f"--data_dir={config.data_dir}"] if config.data_dir else []
    flags += ["--allow_unverified_data"] if config.allow_unverified_data else []
    return flags + ([f"--dataset={config.dataset}"] if config.dataset != "auto" else [])


def _output(config: DoctorConfig, output: Check) -> list[str]:
    if output.exit_code:  # Write to another place.
        return [f"--out={tempfile.gettempdir()}/lockstep-first"]
    return [f"--out={config.out}"] if config.out else []
