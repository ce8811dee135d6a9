"""Lists the causes that keep TensorFlow from using NVIDIA's GPUs, each with advice."""

import platform
from typing import NamedTuple

from app.devices.cuda import DRIVER_LIBRARY, LIBRARIES, Seen, look

CUDA_PACKAGES = "tensorflow[and-cuda]==2.21.0"
INSTALL = f'pip install "{CUDA_PACKAGES}"'
_OLDEST_DRIVER, _OLDEST_CUDA = "525.60.13", 12_000  # Reference: NVIDIA, "CUDA Compatibility".
_CONTAINER = "start a container with docker run --gpus=all"


class Obstacle(NamedTuple):
    """One cause that keeps TensorFlow from using GPUs.

    Attributes:
        what: the component.
        found: what was found instead.
        advice: what to do.
    """

    what: str
    found: str
    advice: str


def obstacles(seen: Seen, *, is_cuda_build: bool) -> list[Obstacle]:
    """Returns all causes that keep TensorFlow from using GPUs, the first to fix in front."""
    found = []
    if not is_cuda_build:
        known = platform.system() == "Linux" and platform.machine() == "x86_64"
        advice = INSTALL if known else "PyPI has one for Linux on x86-64 alone"
        found.append(Obstacle("TensorFlow", "this build of TensorFlow has no CUDA", advice))
    if seen.hides_all:
        shown = f'CUDA_VISIBLE_DEVICES="{seen.visible}" hides every GPU'
        found.append(Obstacle("CUDA_VISIBLE_DEVICES", shown, "unset CUDA_VISIBLE_DEVICES"))
    driver = _driver_obstacle(seen)
    if driver:
        found.append(driver)
    for name, reason in seen.missing.items():
        package = f"{INSTALL}, or {LIBRARIES[name]} alone"
        found.append(Obstacle(name, _shown_reason(name, reason), package))
    return found


def why_no_gpu(*, is_cuda_build: bool) -> str:
    """Returns in words why TensorFlow cannot use a GPU, as far as can be found."""
    found = obstacles(look(), is_cuda_build=is_cuda_build)
    if not found:
        return "its libraries are there, --verbosity=1 shows what TensorFlow says"
    more = f" (and {len(found) - 1} more, which doctor names)" if len(found) > 1 else ""
    return f"{found[0].found}, {found[0].advice}{more}"


def _driver_obstacle(seen: Seen) -> Obstacle | None:
    if seen.driver_library:
        if seen.has_device_file or seen.kernel_driver:
            found = f"the kernel's driver is there, its library {DRIVER_LIBRARY} is not"
            return Obstacle("driver", found, f"install all of NVIDIA's driver; {_CONTAINER}")
        found = f"the driver's library {DRIVER_LIBRARY} is missing"
        return Obstacle("driver", found, f"install NVIDIA's driver; {_CONTAINER}")
    if not seen.has_device_file:
        found = "NVIDIA's driver library is there, but no device (/dev/nvidiactl is missing)"
        return Obstacle("driver", found, f"load its kernel module, modprobe nvidia; {_CONTAINER}")
    if 0 < seen.driver_cuda < _OLDEST_CUDA:
        found = f"the driver knows CUDA up to {shown_version(seen.driver_cuda)}"
        return Obstacle("driver", found, f"install driver {_OLDEST_DRIVER} or newer, for CUDA 12")
    if seen.hides_all:
        return None  # Not distinguishable; the driver reports that there is no device.
    if seen.driver_error:
        found = f"the driver does not start: {seen.driver_error}"
        return Obstacle("driver", found, "see what nvidia-smi says; after an update, restart")
    if not seen.gpus:
        found = "the driver sees no GPU that this process may use"
        return Obstacle("driver", found, "see nvidia-smi -L and CUDA_VISIBLE_DEVICES")
    return None


def _shown_reason(name: str, reason: str) -> str:
    if "cannot open shared object file" in reason:
        absent = reason.partition(":")[0].rpartition("/")[2]
        return (
            f"the library {name} is missing"
            if absent == name
            else (f"the library {name} needs {absent}, which is missing")
        )
    return f"the library {name} cannot be loaded ({reason})"


def shown_version(number: int) -> str:
    """Formats the driver's number of a CUDA version."""
    return f"{number // 1000}.{number % 1000 // 10}"
