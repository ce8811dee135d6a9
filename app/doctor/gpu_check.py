"""Formats the findings about GPUs, devices and the all-reduce."""

from app.config import DoctorConfig
from app.devices.cuda import LIBRARIES, Seen
from app.devices.gpu_obstacles import INSTALL, Obstacle, obstacles, shown_version
from app.doctor.check import NOTE, WARNING, Check
from app.doctor.examination import DevicesSeen, Findings, SelfTestResult, TensorFlow
from app.runtime import console


def check_gpus(config: DoctorConfig, findings: Findings) -> list[Check]:
    """Reports GPUs, and each cause that keeps TensorFlow from using them.

    On a machine without NVIDIA hardware nothing counts as wrong, and the CUDA libraries are shown
    only if a GPU is asked for.
    """
    seen = findings.seen
    if config.device == "cpu":
        return [Check("GPUs", "not looked for: --device=cpu", NOTE)]
    if seen is None:
        return []
    built = findings.tensorflow
    found = obstacles(seen, is_cuda_build=built is None or built.is_cuda_build)
    by_name = {obstacle.what: obstacle for obstacle in found}
    checks = [_check_driver(seen, by_name), _check_visible(seen)]
    if built:
        checks.append(_check_build(built, by_name))
    is_asked = config.num_gpus is not None or config.device == "gpu"
    if is_asked or seen.has_hardware or not seen.missing:
        checks += _check_libraries(seen, by_name)
    return checks


def _check_driver(seen: Seen, by_name: dict[str, Obstacle]) -> Check:
    obstacle = by_name.get("driver")
    if not seen.has_hardware:
        return Check("driver", "no NVIDIA GPU and no driver", NOTE)
    if obstacle:
        on_bus = f" ({console.count(seen.num_on_bus, 'GPU')} on the bus)" if seen.num_on_bus else ""
        return Check("driver", f"{obstacle.found}{on_bus}", WARNING, obstacle.advice)
    version = seen.kernel_driver or "of unknown version"
    return Check("driver", f"{version}, for CUDA up to {shown_version(seen.driver_cuda)}")


def _check_visible(seen: Seen) -> Check:
    what = "CUDA_VISIBLE_DEVICES"
    if seen.visible is None:
        return Check(what, "not set: every GPU may be used", NOTE)
    if seen.hides_all:
        state = WARNING if seen.has_hardware else NOTE
        return Check(what, f'"{seen.visible}" hides every GPU', state, f"to use GPUs, unset {what}")
    return Check(what, seen.visible, NOTE)


def _check_build(built: TensorFlow, by_name: dict[str, Obstacle]) -> Check:
    obstacle = by_name.get("TensorFlow")
    if obstacle:
        return Check("TensorFlow", f"{built.version}, built without CUDA", NOTE, obstacle.advice)
    told = f"{built.version}, built for CUDA {built.cuda_version} and cuDNN {built.cudnn_version}"
    return Check("TensorFlow", told)


def _check_libraries(seen: Seen, by_name: dict[str, Obstacle]) -> list[Check]:
    what, number = "CUDA libraries", len(LIBRARIES)
    if not seen.missing:
        return [Check(what, f"all {number} can be loaded")]
    if not seen.has_hardware:  # One line: no GPU here could use them.
        names = ", ".join(seen.missing)
        return [Check(what, f"missing: {names}", NOTE)]
    there = number - len(seen.missing)
    checks = [Check(what, f"{there} of {number} can be loaded", WARNING, INSTALL)]
    for name in seen.missing:
        found = by_name[name].found.removeprefix(f"the library {name} ")
        told = found.removeprefix("is ")
        checks.append(Check(name, f"{told}; it comes with {LIBRARIES[name]}", WARNING))
    return checks


def check_devices(findings: Findings) -> list[Check]:
    """Reports the devices that a training would use."""
    checks = [Check("devices", text, WARNING) for text in findings.warnings]
    if findings.error:
        return [*checks, Check.of_error("devices", findings.error)]
    devices = findings.devices
    if devices is None:
        return checks
    if devices.simulated:
        told = f"{console.count(len(devices.names), 'logical CPU device')}, simulated: they share"
        return [*checks, Check("devices", f"{told} one processor, timing is not scaling")]
    if "GPU" not in devices.names[0]:
        return [*checks, Check("devices", "the processor, as one device")]
    checks += [_check_gpu(devices, findings.seen, index) for index in range(len(devices.names))]
    unused = devices.num_gpus - len(devices.names)
    if unused:
        checks.append(Check("not used", console.count(unused, "GPU more"), NOTE))
    return checks


def _check_gpu(devices: DevicesSeen, seen: Seen | None, index: int) -> Check:
    name = devices.names[index].removeprefix("/device:")
    told, gpus = devices.descriptions[index], seen.gpus if seen else ()
    if index < len(gpus):
        told += f", {gpus[index].memory_bytes / 2**30:.1f} GiB"
    return Check(name, told)


def check_all_reduce(findings: Findings) -> list[Check]:
    """Reports the result of each strategy's all-reduce self-test."""
    if findings.devices and len(findings.devices.names) == 1:
        return [Check("all-reduce", "one replica: no all-reduce", NOTE)]
    checks = []
    for name, result in findings.self_tests.items():
        if isinstance(result, SelfTestResult):
            told = f"{result.all_reduce} adds every replica once"
            if result.num_replicas == 1:
                told = "LeNet is split over the devices: one replica, no all-reduce"
            told += f" ({result.sec:.1f} s with set-up)"
            checks.append(Check(name, told))
        else:
            checks.append(Check.of_error(name, result))
    return checks
