"""Prints the plan of a cluster."""

import math
from collections.abc import Callable, Sequence

import numpy as np

from app.config import PlanConfig
from app.performance.all_reduce_model import LinearCost
from app.performance.case import Sample
from app.performance.cluster_plan import ClusterStep, Links, numbers_of_workers, predict
from app.performance.training_plan import TrainingPlan
from app.runtime import console

_HEADER = [
    *("workers × devices", "batch", "compute ms", "ring ms", "hier. ms", "step ms", "images/s"),
    *("efficiency", "speed-up"),
]


def print_cluster(plan: TrainingPlan, compute: LinearCost, samples: Sequence[Sample]) -> None:
    """Prints the measurements, and tables for a fixed batch per device and a fixed global batch.

    Args:
        plan: plan of the training.
        compute: cost model fitted to one device.
        samples: measurements of one device.
    """
    config, size_bytes = plan.config, plan.gradient_bytes
    batch, per_worker = plan.batch, config.num_devices_planned
    console.say()
    _print_setting(config, samples, size_bytes)
    is_grpc = "CPU" in samples[0].facts.devices[0]
    if is_grpc:
        console.say(
            "between CPUs, TensorFlow sends over gRPC: the receiver requests each message, which"
            " takes two latencies, and the only algorithm is one ring; GPUs use NCCL"
        )
    links = Links(
        config.bandwidth_gbps * 1e9 / 8,
        config.latency_us * 1e-6,
        config.device_bandwidth_gbps * 1e9 / 8,
        is_grpc=is_grpc,
    )

    def print_table(title: str, batch_of: Callable[[int], int]) -> None:
        steps = [
            predict(
                compute,
                links,
                num_workers=n,
                devices_per_worker=per_worker,
                global_batch_size=batch_of(n),
                size_bytes=size_bytes,
            )
            for n in numbers_of_workers(config.num_workers)
        ]
        console.say()
        console.print_table(title, _HEADER, [_row(step) for step in steps])

    shard = batch // (config.num_workers * per_worker)
    print_table("the same batch on each device", lambda n: shard * n * per_worker)
    print_table(f"the same global batch, {batch:,}", lambda n: batch)
    console.say(
        "predicted, not measured: step = compute + the fastest all-reduce; efficiency:"
        " share of computation in it, to its share if the all-reduce overlapped with the"
        " backward pass (--bucket_mib); time of a device: a straight line through the"
        " measurements; speed-up: over one device with the same global batch"
    )


def _print_setting(config: PlanConfig, samples: Sequence[Sample], size_bytes: float) -> None:
    facts = samples[0].facts
    sizes = ", ".join(
        f"{s.facts.global_batch_size} images {np.median(s.step_secs) * 1e3:.2f} ms" for s in samples
    )
    console.say(
        f"measured on one device here ({facts.devices[0]}, {console.count(facts.cores, 'core')}),"
        f" {config.model}, {config.precision}: {sizes}"
    )
    console.say(
        f"links: {config.bandwidth_gbps:g} Gb/s and {config.latency_us:g} µs between machines,"
        f" {config.device_bandwidth_gbps:g} Gb/s between devices of one;"
        f" {size_bytes / 2**20:.2g} MiB of gradients a step"
    )


def _row(step: ClusterStep) -> list[str]:
    return [
        f"{step.num_workers} × {step.devices_per_worker}",
        f"{step.global_batch_size:,}",
        f"{step.compute_sec * 1e3:.2f}",
        f"{step.ring_sec * 1e3:.2f}",
        f"{step.hierarchical_sec * 1e3:.2f}" if math.isfinite(step.hierarchical_sec) else "–",
        f"{step.step_sec * 1e3:.2f}",
        f"{step.images_per_sec:,.0f}",
        f"{step.efficiency:.0%} to {step.best_efficiency:.0%}",
        f"{step.speed_up:,.1f}",
    ]
