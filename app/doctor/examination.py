"""Examines TensorFlow, its devices and its all-reduce in a separate process.

Each of them may be missing, crash or hang because of a library, a driver or NCCL. The printing
process waits at most 90 s for each result.
"""

import dataclasses
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from app.config import DoctorConfig
from app.config.names import STRATEGY_NAMES
from app.config.training_configs import training_config
from app.data.dataset import IMAGE_SHAPE, NUM_CLASSES
from app.devices import cuda
from app.runtime import console
from app.runtime.errors import DeviceError, LockstepError, reason_of
from app.runtime.processes import call_in_child_process

if TYPE_CHECKING:  # Imported only in the separate process.
    from app.devices.device_setup import Devices

TIMEOUT_SEC = 90.0
_NCCL_ADVICE = (
    "set NCCL_DEBUG=INFO to see where it waits, NCCL_P2P_DISABLE=1 where GPUs cannot reach each"
    " other's memory, or use --all_reduce=reduce_to_one"
)


class TensorFlow(NamedTuple):
    """Versions of TensorFlow.

    Attributes:
        version: version of TensorFlow.
        is_cuda_build: whether it supports NVIDIA's GPUs.
        cuda_version: CUDA version that it was built for; "" without.
        cudnn_version: cuDNN version that it was built for; "" without.
    """

    version: str
    is_cuda_build: bool
    cuda_version: str
    cudnn_version: str


class DevicesSeen(NamedTuple):
    """The devices that a training would use.

    Attributes:
        names: TensorFlow's names of the devices.
        descriptions: product name and compute capability of each device, or nothing.
        simulated: whether the devices share one processor.
        num_gpus: number of GPUs that TensorFlow finds, used or not.
    """

    names: tuple[str, ...]
    descriptions: tuple[str, ...]
    simulated: bool
    num_gpus: int


class SelfTestResult(NamedTuple):
    """The result of the all-reduce self-test of a strategy.

    Attributes:
        strategy: name of the strategy.
        all_reduce: name of the algorithm.
        sec: duration, including setup.
        num_replicas: number of replicas whose gradients are added.
    """

    strategy: str
    all_reduce: str
    sec: float
    num_replicas: int = 2


@dataclasses.dataclass
class Findings:
    """The results of the examination; attributes with default values were not reached.

    Attributes:
        seen: driver, libraries and GPUs, found without TensorFlow.
        tensorflow: versions of TensorFlow.
        devices: the devices that a training would use.
        warnings: warnings of a training.
        self_tests: strategy → result of its all-reduce self-test, or why it failed.
        error: why the examination ended before the self-tests.
    """

    seen: cuda.Seen | None = None
    tensorflow: TensorFlow | None = None
    devices: DevicesSeen | None = None
    warnings: list[str] = dataclasses.field(default_factory=list)
    self_tests: dict[str, SelfTestResult | LockstepError] = dataclasses.field(default_factory=dict)
    error: LockstepError | None = None


def examine(
    config: DoctorConfig, strategies: tuple[str, ...], function: Callable[..., None] | None = None
) -> Findings:
    """Examines everything; repeats without a strategy whose all-reduce hangs or crashes.

    Args:
        config: options of `doctor`.
        strategies: strategies whose all-reduce is tested.
        function: the function that runs in the process instead of `examine_tensorflow`; for tests.
    """
    findings = Findings()
    while True:
        left = tuple(name for name in strategies if name not in findings.self_tests)
        if not _examine_once(findings, config, left, function or examine_tensorflow):
            return findings


def _examine_once(
    findings: Findings,
    config: DoctorConfig,
    strategies: tuple[str, ...],
    function: Callable[..., None],
) -> bool:
    """Runs the process once; returns whether another attempt makes sense."""
    stage = "looking for GPUs"

    def note(message: tuple[str, Any]) -> None:
        nonlocal stage
        kind, value = message
        if kind == "stage":
            stage = value
        elif kind == "warning":
            findings.warnings += [value] * (value not in findings.warnings)
        elif kind == "self_test":
            findings.self_tests[value[0]] = value[1]
        else:
            setattr(findings, kind, value)

    try:
        call_in_child_process(
            function, config, strategies, on_message=note, timeout_sec=TIMEOUT_SEC
        )
        return False
    except TimeoutError:
        error: LockstepError = _hung(stage)
    except LockstepError as raised:
        error = raised
    except RuntimeError as raised:  # TensorFlow raises various exceptions.
        error = DeviceError(f"{stage} failed ({reason_of(raised)}); see --verbosity=1")
    if findings.devices and stage in strategies:
        findings.self_tests[stage] = error
        return True
    findings.error = error
    return False


def _hung(stage: str) -> DeviceError:
    if stage in STRATEGY_NAMES:
        return DeviceError(
            f"the all-reduce of {stage} did not end within {TIMEOUT_SEC:g} s; {_NCCL_ADVICE}"
        )
    return DeviceError(
        f"{stage} did not end within {TIMEOUT_SEC:g} s; check whether nvidia-smi answers,"
        " or use --device=cpu"
    )


def examine_tensorflow(
    send: Callable[[tuple[str, Any]], None], config: DoctorConfig, strategies: tuple[str, ...]
) -> None:
    """Runs in the process; sends each attribute of `Findings` as soon as it is known."""
    os.environ.pop("TF_CONFIG", None)  # `check_cluster` reports it.
    console.forward_warnings(lambda text: send(("warning", text)))
    if config.device != "cpu":
        send(("seen", cuda.look()))
    from app.devices import device_setup

    send(("stage", "importing TensorFlow"))
    tf = device_setup.import_tensorflow(config.verbosity)
    send(("tensorflow", _describe(tf)))
    send(("stage", "setting up devices"))
    prepared = device_setup.set_up(training_config(config, "manual", all_reduce="auto"))
    send(("devices", _describe_devices(tf, prepared)))
    for name in strategies:
        send(("stage", name))
        send(("self_test", (name, _run_self_test(config, prepared, name))))


def _describe(tf: Any) -> TensorFlow:
    build = tf.sysconfig.get_build_info()
    return TensorFlow(
        tf.__version__,
        bool(build.get("is_cuda_build")),
        str(build.get("cuda_version", "")),
        str(build.get("cudnn_version", "")),
    )


def _describe_devices(tf: Any, prepared: "Devices") -> DevicesSeen:
    gpus = tf.config.list_physical_devices("GPU")
    descriptions = [""] * len(prepared.names)
    if "GPU" in prepared.names[0]:
        for index, gpu in enumerate(gpus[: len(prepared.names)]):
            details = tf.config.experimental.get_device_details(gpu)
            capability = ".".join(map(str, details.get("compute_capability", ("unknown",))))
            name = details.get("device_name", "a GPU without a name")
            descriptions[index] = f"{name}, compute capability {capability}"
    return DevicesSeen(tuple(prepared.names), tuple(descriptions), prepared.simulated, len(gpus))


def _run_self_test(
    config: DoctorConfig, prepared: "Devices", name: str
) -> SelfTestResult | LockstepError:
    """Builds LeNet on the devices and all-reduces known numbers, as a training does."""
    from app.training.all_reduce_self_test import run_all_reduce_self_test
    from app.training.strategy_builder import build_strategy

    start = time.monotonic()
    try:
        training = training_config(config, name)
        strategy = build_strategy(
            training,
            prepared,
            image_shape=IMAGE_SHAPE,
            num_classes=NUM_CLASSES,
            learning_rate=0.1,
            num_steps=1,
        )
        run_all_reduce_self_test(strategy)
    except LockstepError as error:
        return error
    except Exception as error:  # TensorFlow and NCCL raise various exceptions.
        return DeviceError(f"the all-reduce of {name} failed ({reason_of(error)}); {_NCCL_ADVICE}")
    sec, num_replicas = time.monotonic() - start, strategy.num_replicas
    return SelfTestResult(name, strategy.algorithm, sec, num_replicas)
