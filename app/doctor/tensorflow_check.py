"""Checks TensorFlow, its devices and its all-reduce in a separate process.

Each of them may be missing, crash or hang because of a library, a driver or NCCL. The printing
process waits at most 90 s for each result.
"""

import dataclasses
import os
from collections.abc import Callable
from typing import Any

from app.devices.gpus import gpu_obstacles, query_driver
from app.doctor.machine import NOTE, OK, WARNING, Check
from app.options import Config
from app.runtime import console
from app.runtime.errors import DeviceError, LockstepError, reason_of
from app.runtime.kernels import VARIABLE, describe_kernels, usable_flags
from app.runtime.processes import call_in_child_process

TIMEOUT_SEC = 90.0
_NCCL_ADVICE = (
    "set NCCL_DEBUG=INFO to see where it waits, NCCL_P2P_DISABLE=1 where GPUs cannot reach each"
    " other's memory, or use --all_reduce=reduce_to_one"
)
Send = Callable[[tuple[str, Any]], None]


@dataclasses.dataclass
class TensorFlowCheck:
    """What was found before the end of the process.

    Attributes:
        checks: the lines to print.
        has_tensorflow: whether TensorFlow can be imported.
        devices: names of the devices that a training would use; empty if they cannot be set up.
        working: strategies whose all-reduce works, in the order of `--strategies`.
    """

    checks: list[Check] = dataclasses.field(default_factory=list)
    has_tensorflow: bool = False
    devices: list[str] = dataclasses.field(default_factory=list)
    working: list[str] = dataclasses.field(default_factory=list)


def check_tensorflow(
    config: Config, function: Callable[[Send, Config], None] | None = None
) -> TensorFlowCheck:
    """Checks everything up to the first step that hangs or crashes.

    Args:
        config: options of `doctor`.
        function: runs in the process instead of `examine`; for tests.
    """
    found, stage = TensorFlowCheck(), "starting"

    def receive(message: tuple[str, Any]) -> None:
        nonlocal stage
        kind, value = message
        if kind == "stage":
            stage = value
        elif kind in ("checks", "working"):
            getattr(found, kind).append(value)
        else:
            setattr(found, kind, value)

    try:
        call_in_child_process(
            function or examine, config, on_message=receive, timeout_sec=TIMEOUT_SEC
        )
    except TimeoutError:
        advice = _NCCL_ADVICE if found.devices else "see whether nvidia-smi answers"
        error = DeviceError(f"{stage} did not end within {TIMEOUT_SEC:g} s; {advice}")
        found.checks.append(Check.of_error(stage, error))
    except LockstepError as raised:
        found.checks.append(Check.of_error(stage, raised))
    except RuntimeError as raised:  # TensorFlow raises various exceptions.
        error = DeviceError(f"{stage} failed ({reason_of(raised)}); see --verbosity=1")
        found.checks.append(Check.of_error(stage, error))
    return found


def examine(send: Send, config: Config) -> None:
    """Runs in the process; sends each attribute of `TensorFlowCheck` as soon as it is known."""
    os.environ.pop("TF_CONFIG", None)
    console.forward_warnings(lambda text: send(("checks", Check("devices", text, WARNING))))
    gpus, reason = query_driver()
    for gpu in gpus or [reason]:
        send(("checks", Check("nvidia-smi", gpu, OK if gpus else NOTE)))
    from app.devices import device_setup

    send(("stage", "TensorFlow"))
    tf = device_setup.import_tensorflow(config.output.verbosity)
    build = tf.sysconfig.get_build_info()
    cuda = f"CUDA {build.get('cuda_version')} and cuDNN {build.get('cudnn_version')}"
    built = f"built for {cuda}" if build.get("is_cuda_build") else "built without CUDA"
    send(("has_tensorflow", True))
    send(("checks", Check("TensorFlow", f"{tf.__version__}, {built}")))
    send(("checks", _check_kernels()))
    send(("stage", "devices"))
    if gpus and config.distribution.device != "cpu" and not tf.config.list_physical_devices("GPU"):
        for cause, advice in gpu_obstacles():
            send(("checks", Check("GPUs", cause, WARNING, advice)))
    prepared = device_setup.set_up(config.for_training("manual", all_reduce="auto"))
    simulated = ", simulated: timing is not scaling" if prepared.simulated else ""
    send(("checks", Check("devices", ", ".join(prepared.names) + simulated)))
    send(("devices", prepared.names))
    for name in config.distribution.strategies:
        if name != "single" and len(prepared.names) > 1:
            send(("stage", name))
            _test_all_reduce(send, config, prepared, name)


def _check_kernels() -> Check:
    """Says which kernels compute on the CPU; warns if a variable chooses the slower ones."""
    from strategies.tf_private import is_onednn_enabled

    has_onednn = is_onednn_enabled()
    shown, value = describe_kernels(has_onednn), os.environ.get(VARIABLE)
    if not has_onednn and value is not None and "avx2" in usable_flags():
        shown = f"{shown} with {VARIABLE}={value}"
        return Check("CPU kernels", shown, WARNING, "oneDNN is faster on this processor: unset it")
    return Check("CPU kernels", shown)


def _test_all_reduce(send: Send, config: Config, prepared: Any, name: str) -> None:
    """Builds LeNet on the devices and all-reduces known numbers, as a training does."""
    from app.training.all_reduce_self_test import run_all_reduce_self_test
    from app.training.strategy_builder import build_strategy

    try:
        strategy = build_strategy(config.for_training(name), prepared)
        run_all_reduce_self_test(strategy)
    except LockstepError as error:
        send(("checks", Check.of_error(name, error)))
    except Exception as error:  # TensorFlow and NCCL raise various exceptions.
        failed = f"the all-reduce of {name} failed ({reason_of(error)}); {_NCCL_ADVICE}"
        send(("checks", Check.of_error(name, DeviceError(failed))))
    else:
        told = f"all-reduce {strategy.algorithm} adds every replica once"
        if strategy.num_replicas == 1:
            told = "LeNet is split over the devices: one replica, no all-reduce"
        send(("checks", Check(name, told)))
        send(("working", name))
