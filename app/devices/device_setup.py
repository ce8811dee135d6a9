"""Sets up TensorFlow's devices and threads. Runs before any other use of TensorFlow."""

import dataclasses
import os
from typing import TYPE_CHECKING

from app.devices.cluster import Cluster, find_cluster
from app.devices.gpus import why_no_gpu
from app.devices.tensorflow_settings import (
    import_tensorflow,
    keep_order_of_summation,
    settle_keras,
)
from app.options import Config
from app.options.names import DEFAULT_LOGICAL_CPUS
from app.runtime import console, kernels
from app.runtime.errors import ConfigError, DeviceError
from lockstep.numeric.memory import keep_freed_memory

if TYPE_CHECKING:
    from strategies.workers import Workers  # Imports TensorFlow.


# Measured: LeNet, batch 256, AVX2, float32 with oneDNN; bfloat16 with Eigen, which TensorFlow uses
# where a processor lacks AVX-512.
_TIMES_OF_EMULATED_BFLOAT16 = 11


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of the replicas.

    Attributes:
        names: device names of all workers, one per replica, for example
            `["/device:GPU:0", "/device:GPU:1"]`.
        simulated: whether several logical devices share a processor, so that times do not show
            scaling.
        intra_op_threads: threads of one operation on a CPU; 0 for TensorFlow's default.
        workers: the processes that train together; None for a single process.
        cluster: the cluster of the workers; None for a single process.
    """

    names: list[str]
    simulated: bool
    intra_op_threads: int = 0
    workers: "Workers | None" = None
    cluster: Cluster | None = None


def set_up(config: Config) -> Devices:
    """Chooses and prepares the devices for `config`; must be the first use of TensorFlow.

    GPUs get memory growth, so that two programs can share one. A CPU is split into logical devices
    that share its cores; the threads of an operation are limited so that the replicas' operations
    run in parallel instead of in turn (measured on 2 cores: 6.8 s per epoch instead of 8).

    With `multi_worker`, returns once all workers of the cluster are connected.

    Raises:
        ConfigError: the cluster is invalid, its workers' settings differ, or oneDNN cannot compute
            in the precision.
        DeviceError: GPUs are required and there are too few.
        PeerLostError: a worker was lost while connecting.
    """
    cluster = find_cluster(os.environ) if config.distribution.strategy == "multi_worker" else None
    keep_freed_memory()
    if os.environ.pop("TF_CONFIG", None) and not cluster:
        console.warn(
            f"TF_CONFIG is set, but {config.distribution.strategy} runs on one machine: not used"
        )
    tf = import_tensorflow(config.output.verbosity)
    settle_keras()
    gpus = tf.config.list_physical_devices("GPU") if config.distribution.device != "cpu" else []
    wanted = config.num_devices_asked
    _check_gpus(config, gpus, wanted)
    if config.distribution.num_gpus and not gpus and (cluster is None or cluster.is_chief):
        console.warn(
            f"--num_gpus={config.distribution.num_gpus}, but this machine has no GPU that"
            " TensorFlow can use:"
            f" {console.count(config.distribution.num_gpus, 'replica')} on logical CPU devices"
            " instead, whose times say nothing of GPUs"
        )
    default = len(gpus) or (1 if cluster else DEFAULT_LOGICAL_CPUS)
    devices = _prepare(gpus[: wanted or default], wanted or default, cluster)
    if config.training.precision == "mixed_bfloat16" and not gpus:
        _check_bfloat16()
    keep_order_of_summation()
    if config.training.deterministic:
        tf.config.experimental.enable_op_determinism()
    return _of_all_workers(devices, cluster, config) if cluster else devices


def _check_bfloat16() -> None:
    """Warns if the kernels of the CPU emulate bfloat16.

    Raises:
        ConfigError: oneDNN is limited to instruction sets in which it fails.
    """
    from strategies.tf_private import is_onednn_enabled

    flags, has_onednn = kernels.read_flags(), is_onednn_enabled()
    usable = kernels.usable_flags(flags)
    if not flags or (has_onednn and kernels.computes_in_bfloat16(usable)):
        return
    if has_onednn and "avx512f" in flags - usable:  # TensorFlow asks for AVX-512, and oneDNN fails.
        raise ConfigError(
            "--precision=mixed_bfloat16: TensorFlow fails because ONEDNN_MAX_CPU_ISA excludes this"
            " processor's AVX-512; unset the variable"
        )
    shown = kernels.describe_kernels(has_onednn)
    console.warn(
        f"--precision=mixed_bfloat16: the kernels of this CPU ({shown})"
        f" emulate bfloat16: LeNet takes about {_TIMES_OF_EMULATED_BFLOAT16} times as long as in"
        " float32"
    )


def _prepare(gpus: list, num_devices: int, cluster: Cluster | None) -> Devices:
    """Prepares GPUs or logical CPU devices, or uses the existing ones if it is too late for that.

    TensorFlow cannot change its devices after their first use: in a notebook, or for a second
    command of one process. If there are more logical CPU devices than requested, the first are
    used.
    """
    try:
        return _set_up_gpus(gpus) if gpus else _set_up_logical_cpus(num_devices, cluster)
    except RuntimeError:
        if cluster:  # A process joins a cluster before TensorFlow's first operation or not at all.
            raise
        return _take_devices("GPU" if gpus else "CPU", num_devices)


def _take_devices(kind: str, num_devices: int) -> Devices:
    import tensorflow as tf

    names = [f"/device:{kind}:{i}" for i in range(len(tf.config.list_logical_devices(kind)))]
    if len(names) < num_devices:
        raise DeviceError(
            f"{console.count(num_devices, f'{kind} device')} requested, but this process has"
            f" {console.count(len(names), f'{kind} device')} and TensorFlow cannot change that;"
            " use a new process, or call app.run, which starts one for each command"
        )
    return Devices(
        names[:num_devices],
        simulated=kind == "CPU" and num_devices > 1,
        intra_op_threads=tf.config.threading.get_intra_op_parallelism_threads(),
    )


def count_gpus(config: Config) -> int:
    """Returns how many GPUs TensorFlow finds; can be called before `set_up` and changes nothing."""
    return len(import_tensorflow(config.output.verbosity).config.list_physical_devices("GPU"))


def num_cores() -> int:
    """Returns how many processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _check_gpus(config: Config, gpus: list, wanted: int | None) -> None:
    """Raises an error for GPUs that are not there; without GPUs, only for `--device=gpu`."""
    if config.distribution.device == "gpu" and not gpus:
        raise DeviceError(
            f"--device=gpu: TensorFlow sees no GPU ({why_no_gpu()}); use --device=cpu"
            f" --num_devices={wanted or DEFAULT_LOGICAL_CPUS}"
        )
    if gpus and wanted and wanted > len(gpus):
        raise too_few_gpus(wanted, len(gpus))


def too_few_gpus(wanted: int, found: int) -> DeviceError:
    """Returns the error for more devices than there are GPUs."""
    return DeviceError(
        f"{console.count(wanted, 'device')} requested, but TensorFlow sees"
        f" {console.count(found, 'GPU')}; use --num_gpus={found}, or --device=cpu"
        f" --num_devices={wanted}"
    )


def _set_up_gpus(gpus: list) -> Devices:
    import tensorflow as tf

    tf.config.set_visible_devices(gpus, "GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)
    return Devices([f"/device:GPU:{i}" for i in range(len(gpus))], simulated=False)


def _of_all_workers(local: Devices, cluster: Cluster, config: Config) -> Devices:
    """Joins the cluster and returns the devices of all workers, each with as many as this one."""
    from app.devices.rendezvous import join

    workers = join(cluster, local.names, config)
    return dataclasses.replace(
        local,
        names=[
            f"/job:worker/replica:0/task:{index}{name}"
            for index in range(workers.count)
            for name in local.names
        ],
        simulated=local.simulated or (cluster.shares_machines and "CPU" in local.names[0]),
        workers=workers,
        cluster=cluster,
    )


def _set_up_logical_cpus(num_devices: int, cluster: Cluster | None) -> Devices:
    import tensorflow as tf

    tf.config.set_visible_devices([], "GPU")
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(
        cpu, [tf.config.LogicalDeviceConfiguration() for _ in range(num_devices)]
    )
    cores = num_cores()
    intra_op_threads = max(1, cores // num_devices)
    tf.config.threading.set_intra_op_parallelism_threads(intra_op_threads)
    # A worker's collectives have their own threads. On one core, a second thread for operations
    # competes with the first: ResNet-18 took 6 % longer with it.
    least = num_devices if cluster else 2
    tf.config.threading.set_inter_op_parallelism_threads(max(least, cores))
    names = [f"/device:CPU:{i}" for i in range(num_devices)]
    return Devices(names, simulated=num_devices > 1, intra_op_threads=intra_op_threads)
