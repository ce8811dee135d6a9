"""Sets up TensorFlow's devices and threads. Runs before any other use of TensorFlow."""

import dataclasses
import json
import os
from typing import TYPE_CHECKING, Any

from app import console, signals
from app.devices.cluster import Cluster, find_cluster, naming_lost_peers, wait_for_workers
from app.devices.import_tf import import_tensorflow
from app.errors import ConfigError, DeviceError, PeerLostError
from app.options import Config
from lockstep.numeric.memory import keep_freed_memory

if TYPE_CHECKING:
    from strategies.multi_worker import ClusterWorkers  # Imports TensorFlow.

DEFAULT_LOGICAL_CPUS = 2
# Options that may differ between workers: paths and display.
_OWN_OPTIONS = ("out", "overwrite", "data_dir", "stall_timeout_sec", "num_workers")


@dataclasses.dataclass(frozen=True)
class Devices:
    """The devices of the replicas of all workers."""

    names: list[str]  # One per replica, for example "/device:GPU:0".
    simulated: bool  # Whether several share a processor, so that times do not show scaling.
    workers: "ClusterWorkers | None" = None  # None for a single process.


def set_up(config: Config) -> Devices:
    """Prepares the devices, and connects workers; must be the first use of TensorFlow."""
    distribution = config.distribution
    cluster = find_cluster() if distribution.strategy == "multi_worker" else None
    if os.environ.pop("TF_CONFIG", None) and not cluster:
        console.warn(f"TF_CONFIG is set, but {distribution.strategy} runs on one machine: not used")
    if cluster and distribution.num_workers not in (None, len(cluster.addresses)):
        raise ConfigError(
            f"--num_workers={distribution.num_workers}, but the cluster has"
            f" {console.count(len(cluster.addresses), 'worker')}; leave --num_workers out"
        )
    keep_freed_memory()
    tf = import_tensorflow()
    gpus = tf.config.list_physical_devices("GPU") if distribution.device != "cpu" else []
    wanted = distribution.num_gpus if config.has_workers else config.num_devices
    _check_devices(config, wanted, len(gpus), is_chief=not cluster or cluster.index == 0)
    number = wanted or len(gpus) or (1 if config.has_workers else DEFAULT_LOGICAL_CPUS)
    kind = "GPU" if gpus else "CPU"
    try:
        tf.config.set_visible_devices(gpus[:number], "GPU")
        for gpu in gpus[:number]:
            tf.config.experimental.set_memory_growth(gpu, True)
        if not gpus:
            _split_cpu(tf, number, is_worker=config.has_workers)
    except RuntimeError:  # TensorFlow has been used, as in a notebook.
        _check_existing(tf, kind, number)
    names = [f"/device:{kind}:{index}" for index in range(number)]
    devices = Devices(names, simulated=kind == "CPU" and number > 1)
    if config.training.deterministic:
        tf.config.experimental.enable_op_determinism()
    return _join(cluster, devices, config) if cluster else devices


def _check_devices(config: Config, wanted: int | None, num_gpus: int, *, is_chief: bool) -> None:
    """Compares the devices that are asked for with the GPUs that there are."""
    asked, device = config.distribution.num_gpus, config.distribution.device
    if num_gpus < (wanted or 1) and (num_gpus or device == "gpu"):
        flag = f"--num_gpus={wanted}" if num_gpus else "--device=gpu"
        seen = console.count(num_gpus, "GPU") if num_gpus else "no GPU"
        raise DeviceError(
            f"{flag}: TensorFlow sees {seen}; find out why with the"
            f" command doctor, or use --device=cpu --num_devices={wanted or DEFAULT_LOGICAL_CPUS}"
        )
    if num_gpus or not asked or device == "cpu":
        return
    if config.has_workers and asked > 1:
        raise DeviceError(
            f"--num_gpus={asked} with multi_worker needs {asked} GPUs for each worker, found none;"
            " without GPUs, each worker has one device: use more workers"
        )
    if is_chief:
        console.warn(
            f"{console.count(asked, 'device')} asked for, but this machine has no GPU that"
            f" TensorFlow can use: {console.count(asked, 'replica')} on logical CPU devices"
            " instead, whose times say nothing of GPUs"
        )


def _split_cpu(tf: Any, num_devices: int, *, is_worker: bool) -> None:
    """Splits the CPU into logical devices, which share its cores."""
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(num_devices)]
    tf.config.set_logical_device_configuration(cpu, logical)
    cores = len(os.sched_getaffinity(0))
    # So that operations of replicas run in parallel, not in turn: on 2 cores 0.85 of the time.
    tf.config.threading.set_intra_op_parallelism_threads(max(1, cores // num_devices))
    # A worker's collectives have their own threads. On one core, a second thread for operations
    # competes with the first: ResNet-18 took 6 % longer with it.
    least = num_devices if is_worker else 2
    tf.config.threading.set_inter_op_parallelism_threads(max(least, cores))


def _check_existing(tf: Any, kind: str, num_devices: int) -> None:
    """Checks that a process that has used TensorFlow has enough devices."""
    existing = len(tf.config.list_logical_devices(kind))
    if existing < num_devices:
        raise DeviceError(
            f"{num_devices} {kind}s requested, but this process has {existing} and TensorFlow"
            " cannot change that; call app.run, which starts a new process for each command"
        )


def _join(cluster: Cluster, local: Devices, config: Config) -> Devices:
    """Connects this worker with the others; returns the devices of all workers."""
    if cluster.index == 0:
        count = console.count(len(cluster.addresses), "worker")
        console.say(f"cluster of {count}: {', '.join(cluster.addresses)}")
    wait_for_workers(cluster)
    os.environ["TF_CONFIG"] = cluster.tf_config  # A chief is worker 0; SLURM's workers have none.
    from strategies.multi_worker import ClusterWorkers

    is_gpu, algorithm = "GPU" in local.names[0], config.distribution.all_reduce
    if algorithm == "auto":
        algorithm = "nccl" if is_gpu else "ring"
    stalled = PeerLostError("a worker came and was lost; run the same command again")
    # TensorFlow's call waits without a limit, and lets no thread of Python run.
    with signals.stall_limit(60.0, stalled):
        workers = ClusterWorkers(algorithm)
    signals.reinstall()
    with naming_lost_peers(workers):
        _compare_settings(workers, config, local)
    tasks = [f"/job:worker/replica:0/task:{index}" for index in range(workers.count)]
    hosts = {address.rpartition(":")[0] for address in cluster.addresses}
    simulated = not is_gpu and len(hosts) < workers.count
    return Devices([task + name for task in tasks for name in local.names], simulated, workers)


def _compare_settings(workers: "ClusterWorkers", config: Config, local: Devices) -> None:
    """Raises `ConfigError` if options, devices or versions of workers differ."""
    from app.records.history import versions

    own = {f"--{name}": v for name, v in config.values().items() if name not in _OWN_OPTIONS}
    own |= {"devices": f"{len(local.names)} {local.names[0].split(':')[1]}", **versions()}
    first, *others = map(json.loads, workers.gather(json.dumps(own).encode()))
    for index, other in enumerate(others, start=1):
        for name in {**first, **other}:
            if (a := first.get(name)) != (b := other.get(name)):
                raise ConfigError(
                    f"workers differ ({name}: worker 0 has {a}, worker {index} has {b}); start all"
                    " of them with the same flags, devices and versions"
                )
