"""Finds NVIDIA's driver, GPUs and libraries.

Does not import TensorFlow, which may fail to load.
"""

import ctypes
import importlib.util
import os
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

# Library that TensorFlow 2.21 loads for a GPU, as its loader names it, and the two that these load
# in turn → the package that provides it.
LIBRARIES = {
    "libcudart.so.12": "nvidia-cuda-runtime-cu12",
    "libcublas.so.12": "nvidia-cublas-cu12",
    "libcublasLt.so.12": "nvidia-cublas-cu12",
    "libcufft.so.11": "nvidia-cufft-cu12",
    "libcusolver.so.11": "nvidia-cusolver-cu12",
    "libcusparse.so.12": "nvidia-cusparse-cu12",
    "libcudnn.so.9": "nvidia-cudnn-cu12",
    "libnccl.so.2": "nvidia-nccl-cu12",
    "libnvrtc.so.12": "nvidia-cuda-nvrtc-cu12",
    "libnvJitLink.so.12": "nvidia-nvjitlink-cu12",
}
DRIVER_LIBRARY = "libcuda.so.1"
_DEVICE_FILES = ("dev/nvidiactl", "dev/dxg")  # The latter in WSL.
_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR and _MINOR.


class Gpu(NamedTuple):
    """A GPU as reported by the driver, without TensorFlow.

    Attributes:
        name: product name.
        memory_bytes: total memory.
        compute_capability: major and minor.
    """

    name: str
    memory_bytes: int
    compute_capability: tuple[int, int]


class Seen(NamedTuple):
    """What was found of NVIDIA's GPUs on this machine.

    Attributes:
        visible: CUDA_VISIBLE_DEVICES; None if it is not set.
        num_on_bus: number of NVIDIA's graphics devices on the PCI bus.
        has_device_file: whether the kernel driver has created a device file.
        kernel_driver: version of the kernel driver; None if it is not running.
        driver_library: why the driver's library cannot be loaded; None if it can.
        driver_cuda: newest CUDA version that the driver supports, as 12050 for 12.5; 0 if unknown.
        driver_error: the driver's error when it is initialised; None without one.
        gpus: GPUs that the driver makes available to this process.
        missing: library → why it cannot be loaded.
    """

    visible: str | None
    num_on_bus: int
    has_device_file: bool
    kernel_driver: str | None
    driver_library: str | None
    driver_cuda: int
    driver_error: str | None
    gpus: tuple[Gpu, ...]
    missing: dict[str, str]

    @property
    def has_hardware(self) -> bool:
        """Whether there is any sign of an NVIDIA GPU."""
        return bool(
            self.num_on_bus or self.has_device_file or self.kernel_driver or not self.driver_library
        )

    @property
    def hides_all(self) -> bool:
        """Whether CUDA_VISIBLE_DEVICES hides every GPU from this process."""
        # CUDA reads names up to the first invalid one.
        return self.visible is not None and self.visible.split(",")[0].strip() in ("", "-1")


def look(
    environ: Mapping[str, str] = os.environ,
    load: Callable[[str], ctypes.CDLL] = ctypes.CDLL,
    root: pathlib.Path = pathlib.Path("/"),
) -> Seen:
    """Finds driver, GPUs and libraries; loads the libraries into this process.

    Args:
        environ: environment variables.
        load: loads a library by name or path, or raises `OSError`.
        root: root of the file system.
    """
    reason, cuda_version, driver_error = None, 0, None
    gpus: tuple[Gpu, ...] = ()
    try:
        driver = load(DRIVER_LIBRARY)
    except OSError as error:
        reason = str(error)
    else:
        cuda_version, driver_error, gpus = _ask_driver(driver)
    return Seen(
        visible=environ.get("CUDA_VISIBLE_DEVICES"),
        num_on_bus=_num_on_bus(root),
        has_device_file=has_device_file(root),
        kernel_driver=_kernel_driver(root),
        driver_library=reason,
        driver_cuda=cuda_version,
        driver_error=driver_error,
        gpus=gpus,
        missing=_missing_libraries(load),
    )


def has_device_file(root: pathlib.Path = pathlib.Path("/")) -> bool:
    """Returns whether the kernel makes an NVIDIA GPU available to this process."""
    return any((root / name).exists() for name in _DEVICE_FILES)


def _ask_driver(driver: ctypes.CDLL) -> tuple[int, str | None, tuple[Gpu, ...]]:
    """Asks the driver for its newest CUDA version and its GPUs; reserves no GPU memory."""
    number = ctypes.c_int(0)
    driver.cuDriverGetVersion(ctypes.byref(number))
    cuda_version = number.value
    code = driver.cuInit(0)
    if code:
        name = ctypes.c_char_p()
        driver.cuGetErrorName(code, ctypes.byref(name))
        return cuda_version, (name.value or b"").decode() or f"error {code}", ()
    driver.cuDeviceGetCount(ctypes.byref(number))
    return cuda_version, None, tuple(_gpu(driver, index) for index in range(number.value))


def _gpu(driver: ctypes.CDLL, index: int) -> Gpu:
    device, number, size = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    name = ctypes.create_string_buffer(256)
    driver.cuDeviceGet(ctypes.byref(device), index)
    driver.cuDeviceGetName(name, len(name), device)
    driver.cuDeviceTotalMem_v2(ctypes.byref(size), device)
    driver.cuDeviceGetAttribute(ctypes.byref(number), _MAJOR, device)
    major = number.value
    driver.cuDeviceGetAttribute(ctypes.byref(number), _MINOR, device)
    return Gpu(name.value.decode(errors="replace"), size.value, (major, number.value))


def _num_on_bus(root: pathlib.Path) -> int:
    count = 0
    for device in (root / "sys/bus/pci/devices").glob("*"):
        try:
            vendor, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        count += vendor == "0x10de" and kind.startswith("0x03")  # NVIDIA; display class.
    return count


def _kernel_driver(root: pathlib.Path) -> str | None:
    try:
        text = (root / "proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"\s(\d+(?:\.\d+)+)\s", text)
    return match[1] if match else "of unknown version"


def _missing_libraries(load: Callable) -> dict[str, str]:
    """Tries to load each library from where TensorFlow does: system paths and Python packages."""
    missing = {}
    for name in LIBRARIES:
        try:
            load(name)
        except OSError as error:
            reason = str(error)
            for path in _in_packages(name):
                try:
                    load(str(path))
                    break
                except OSError as of_file:
                    reason = str(of_file)
            else:
                missing[name] = reason
    return missing


def _in_packages(name: str) -> list[pathlib.Path]:
    """Returns the paths at which Python packages install a library, beside TensorFlow's folder."""
    found = importlib.util.find_spec("tensorflow")
    places = found.submodule_search_locations if found else None
    return [
        p for place in places or () for p in pathlib.Path(place).parent.glob(f"nvidia/*/lib/{name}")
    ]
