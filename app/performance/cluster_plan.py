"""Predicts a step on a cluster: compute is measured, the all-reduce is calculated."""

import dataclasses
import math

from app.performance.all_reduce_model import LinearCost
from app.training.call_length import num_steps_of_call

# Latency of a message between devices of one machine; NCCL's model has 3 to 7 µs.
_DEVICE_LATENCY_SEC = 5e-6
# Fraction of a step's compute in which gradients become ready to send: two of three products.
_BACKWARD = 2 / 3


@dataclasses.dataclass(frozen=True)
class Links:
    """The connections between devices.

    Attributes:
        bytes_per_sec: bandwidth of a machine's network, in one direction.
        latency_sec: latency of a message between machines.
        device_bytes_per_sec: bandwidth of a device's link within its machine, in one direction.
        is_grpc: whether TensorFlow's collectives send over gRPC, as between CPUs, instead of NCCL.
            Each message is then requested by its receiver, and the only algorithm is one ring.
    """

    bytes_per_sec: float
    latency_sec: float
    device_bytes_per_sec: float
    is_grpc: bool = False

    @property
    def message_latency_sec(self) -> float:
        """Latency of a message with its request, if it has one."""
        return self.latency_sec * (2 if self.is_grpc else 1)


@dataclasses.dataclass(frozen=True)
class ClusterStep:
    """A predicted step on a cluster.

    Attributes:
        num_workers: number of machines.
        devices_per_worker: number of devices per machine.
        global_batch_size: examples per step.
        compute_sec: seconds of one device for its shard.
        ring_sec: seconds of an all-reduce with one ring through all devices.
        hierarchical_sec: seconds of an all-reduce with rings within and between machines; infinite
            if the collectives have none.
        one_device_sec: seconds of one device for the whole batch.
        message_sec: seconds of an all-reduce of a few numbers: after each call of several steps the
            workers exchange totals, and what they agree on.
    """

    num_workers: int
    devices_per_worker: int
    global_batch_size: int
    compute_sec: float
    ring_sec: float
    hierarchical_sec: float
    one_device_sec: float
    message_sec: float = 0.0

    @property
    def num_replicas(self) -> int:
        """The total number of devices."""
        return self.num_workers * self.devices_per_worker

    @property
    def all_reduce_sec(self) -> float:
        """Seconds of the faster all-reduce, without overlap."""
        return min(self.ring_sec, self.hierarchical_sec)

    @property
    def step_sec(self) -> float:
        """Seconds of a step whose all-reduce starts after the backward pass."""
        step_sec = self.compute_sec + self.all_reduce_sec
        return step_sec + self.message_sec / num_steps_of_call(step_sec, self.message_sec)

    @property
    def overlapped_sec(self) -> float:
        """Seconds of a step at best, with the all-reduce overlapped with the backward pass."""
        hidden = min(self.all_reduce_sec, _BACKWARD * self.compute_sec)
        return self.step_sec - hidden

    @property
    def images_per_sec(self) -> float:
        """Images per second, without overlap."""
        return self.global_batch_size / self.step_sec

    @property
    def efficiency(self) -> float:
        """Fraction of the time in which devices compute, without overlap."""
        return self.compute_sec / self.step_sec

    @property
    def best_efficiency(self) -> float:
        """Fraction of the time in which devices compute, with overlap."""
        return self.compute_sec / self.overlapped_sec

    @property
    def speed_up(self) -> float:
        """Speed-up over one device with the whole batch."""
        return self.one_device_sec / self.step_sec


def ring(num_workers: int, devices_per_worker: int, size_bytes: float, links: Links) -> float:
    """Returns the seconds of an all-reduce with one ring through all devices, machine by machine.

    2 (R − 1) consecutive messages of 1/R of the gradients each; the slowest link determines the
    time.

    Reference: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations", 2009.
    """
    r = num_workers * devices_per_worker
    spans = num_workers > 1
    rate = links.bytes_per_sec if spans else links.device_bytes_per_sec
    latency = links.message_latency_sec if spans else _DEVICE_LATENCY_SEC
    return 2 * (r - 1) * (latency + size_bytes / r / rate)


def hierarchical(
    num_workers: int, devices_per_worker: int, size_bytes: float, links: Links
) -> float:
    """Returns the seconds of an all-reduce with rings within machines and between them.

    The first rings leave each device with 1/D of its machine's sum; the D rings between machines
    share the network, which carries 2 (W − 1) / W of the gradients, as with one ring, in fewer
    messages. Infinite over gRPC, where TensorFlow has no such algorithm.

    Reference: X. Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision",
    2018, section 4.
    """
    w, d = num_workers, devices_per_worker
    within = 2 * (d - 1) * (_DEVICE_LATENCY_SEC + size_bytes / d / links.device_bytes_per_sec)
    if links.is_grpc:
        return math.inf
    between = 2 * (w - 1) * (links.latency_sec + size_bytes / w / links.bytes_per_sec)
    return within + between


def predict(
    compute: LinearCost,
    links: Links,
    *,
    num_workers: int,
    devices_per_worker: int,
    global_batch_size: int,
    size_bytes: float,
) -> ClusterStep:
    """Predicts a step with the faster of the two all-reduces.

    Args:
        compute: cost of a step without all-reduce on one device.
        links: connections between devices and machines.
        num_workers: number of machines.
        devices_per_worker: number of devices per machine.
        global_batch_size: examples per step over all devices.
        size_bytes: bytes of the gradients.
    """
    return ClusterStep(
        num_workers,
        devices_per_worker,
        global_batch_size,
        compute.sec(-(-global_batch_size // (num_workers * devices_per_worker))),
        ring(num_workers, devices_per_worker, size_bytes, links),
        hierarchical(num_workers, devices_per_worker, size_bytes, links),
        compute.sec(global_batch_size),
        ring(num_workers, devices_per_worker, 0, links),
    )


def numbers_of_workers(num_workers: int) -> list[int]:
    """Returns 1, 2, 4, … and `num_workers` itself."""
    numbers = [1]
    while 2 * numbers[-1] < num_workers:
        numbers.append(2 * numbers[-1])
    return sorted({*numbers, num_workers})
