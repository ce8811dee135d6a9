"""Finds out why TensorFlow uses no NVIDIA GPU, by `nvidia-smi` and TensorFlow's own log."""

import os
import re
import sys

from app.runtime.processes import output_of

CUDA_PACKAGES = "tensorflow[and-cuda]==2.21.0"
_INSTALL = f'pip install "{CUDA_PACKAGES}"'
_SMI_TIMEOUT_SEC, _LOG_TIMEOUT_SEC = 10, 60
_FIND_GPUS = """
import tensorflow as tf
print("is_cuda_build", tf.sysconfig.get_build_info().get("is_cuda_build"))
tf.config.list_physical_devices("GPU")
"""


def query_driver() -> tuple[list[str], str]:
    """Asks `nvidia-smi` for GPUs; returns a line for each one, or none and the reason."""
    fields = "--query-gpu=name,memory.total,driver_version"
    try:
        command = ["nvidia-smi", fields, "--format=csv,noheader"]
        exit_code, text = output_of(command, timeout_sec=_SMI_TIMEOUT_SEC)
    except FileNotFoundError:
        return [], "nvidia-smi is not installed, so there is no NVIDIA driver"
    except OSError as error:
        return [], f"nvidia-smi does not answer ({error})"
    lines = text.strip().splitlines()
    if exit_code or not lines:
        return [], f"nvidia-smi: {lines[0] if lines else 'no GPU'}"
    return lines, ""


def gpu_obstacles() -> list[tuple[str, str]]:
    """Returns what keeps TensorFlow from using GPUs, as far as can be found, each with advice.

    Starts a process, in which TensorFlow logs the libraries that it cannot load.
    """
    found = []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    # CUDA reads names up to the first invalid one.
    if visible is not None and visible.split(",")[0].strip() in ("", "-1"):
        hides = f'CUDA_VISIBLE_DEVICES="{visible}" hides every GPU'
        found.append((hides, "unset CUDA_VISIBLE_DEVICES"))
    gpus, reason = query_driver()
    if not gpus:
        found.append((reason, "install NVIDIA's driver; in a container, docker run --gpus=all"))
    log = _tensorflow_log()
    if "is_cuda_build False" in log:
        found.append(("this build of TensorFlow has no CUDA", f"{_INSTALL} on Linux"))
    for name in dict.fromkeys(re.findall(r"Could not load dynamic library '([^']+)'", log)):
        from_driver = name.startswith("libcuda.so")
        advice = "it comes with NVIDIA's driver" if from_driver else _INSTALL
        found.append((f"TensorFlow cannot load {name}", advice))
    for message in re.findall(r"failed call to cuInit: (.+)", log):
        found.append((f"cuInit failed: {message}", "see what nvidia-smi prints"))
    return found


def why_no_gpu() -> str:
    """Returns in words why TensorFlow uses no GPU, with advice for the first cause."""
    found = gpu_obstacles()
    if not found:
        return "nvidia-smi and TensorFlow's log name no cause, --verbosity=1 shows all messages"
    causes = ", ".join(cause for cause, _ in found)
    return f"{causes}: {found[0][1].replace('; ', ', ')}"


def _tensorflow_log() -> str:
    """Returns what TensorFlow prints while it looks for GPUs."""
    changes = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "dso_loader=1"}
    try:
        return output_of(
            [sys.executable, "-c", _FIND_GPUS],
            timeout_sec=_LOG_TIMEOUT_SEC,
            environment=changes,
        )[1]
    except OSError:
        return ""
