"""`plan`: what a cluster would do, from what one device does here and from the speed of links."""

import numpy as np

from app import console
from app.config import Config
from app.options import NUM_TRAIN_EXAMPLES
from app.speed.exchange_model import LinearCost
from app.speed.plan import Links, hierarchical, numbers_of_workers, predict, ring
from app.speed.point import Point, Sampled
from app.speed.rounds import measure

_ROUNDS = 5
_LARGEST_SHARD = 256  # A step's time is a straight line in the shard: no larger one is measured.
_FEW_STEPS = 50


def run(config: Config) -> int:
    """Measures one device, predicts the cluster and prints both; trains and writes nothing."""
    num_replicas = config.num_workers * config.devices_per_worker
    batch = config.planned_batch_size
    shard = -(-batch // num_replicas)
    with console.StepProgress(1) as progress:
        first = min(shard, _LARGEST_SHARD)
        points = [_point(config, size) for size in (first, 2 * first, 4 * first)]
        sampled = measure(points, repeats=_ROUNDS, progress=progress).sampled
    compute = LinearCost.fit(
        [s.facts.global_batch_size for s in sampled],
        [float(np.median(s.step_secs)) for s in sampled],
    )
    _print_plan(config, compute, sampled, batch)
    return 0


def _point(config: Config, size: int) -> Point:
    """Returns one device with a batch of its own, without input."""
    training = config.for_training(
        "single", dataset="synthetic", num_train_examples=size, global_batch_size=size
    )
    return Point(training, reads_input=False)


def _print_plan(config: Config, compute: LinearCost, sampled: list[Sampled], batch: int) -> None:
    facts = sampled[0].facts
    links = Links(
        config.bandwidth_gbps * 1e9 / 8,
        config.latency_us * 1e-6,
        config.device_bandwidth_gbps * 1e9 / 8,
    )
    sizes = ", ".join(
        f"{s.facts.global_batch_size} images {np.median(s.step_secs) * 1e3:.2f} ms" for s in sampled
    )
    size_bytes = facts.gradient_bytes * (0.5 if config.exchange_dtype == "bfloat16" else 1.0)
    count = console.count
    console.say(
        f"measured on one device here ({facts.devices[0]}, {count(facts.cores, 'core')}),"
        f" {config.model}, {config.precision}: {sizes}"
    )
    console.say(
        f"links: {config.bandwidth_gbps:g} Gb/s and {config.latency_us:g} µs between machines,"
        f" {config.device_bandwidth_gbps:g} Gb/s between devices of one;"
        f" {size_bytes / 1e6:.1f} MB of gradients a step"
    )
    shard = batch // (config.num_workers * config.devices_per_worker)
    for title, batches in (
        ("the same batch on each device", lambda n: shard * n * config.devices_per_worker),
        (f"the same global batch, {batch:,}", lambda n: batch),
    ):
        rows = []
        for n in numbers_of_workers(config.num_workers):
            step = predict(
                compute,
                links,
                num_workers=n,
                devices_per_worker=config.devices_per_worker,
                global_batch_size=batches(n),
                size_bytes=size_bytes,
            )
            all_reduces = [
                exchange(n, config.devices_per_worker, size_bytes, links).sec * 1e3
                for exchange in (ring, hierarchical)
            ]
            rows.append(
                [
                    f"{n} × {config.devices_per_worker}",
                    f"{step.global_batch_size:,}",
                    f"{step.compute_sec * 1e3:.2f}",
                    *(f"{ms:.2f}" for ms in all_reduces),
                    f"{step.step_sec * 1e3:.2f}",
                    f"{step.images_per_sec:,.0f}",
                    f"{step.efficiency:.0%} to {step.best_efficiency:.0%}",
                    f"{step.speed_up:,.1f}",
                ]
            )
        console.say()
        console.print_table(title, _HEADER, rows)
    console.say(
        "predicted, not measured: step = compute + the faster exchange; efficiency: compute's part"
        " of it, to what it would be with the exchange behind the backward pass (--bucket_mb); time"
        " of a device: a straight line through what was measured; speed-up: against one device with"
        " the same global batch"
    )
    steps = NUM_TRAIN_EXAMPLES // batch
    if steps < _FEW_STEPS:
        console.warn(
            f"a global batch of {batch:,} leaves {count(steps, 'step')} an epoch of"
            f" {NUM_TRAIN_EXAMPLES:,} images: few to learn from; use fewer devices, a smaller batch"
            " or more epochs"
        )


_HEADER = [
    "workers × devices",
    "batch",
    "compute ms",
    "ring ms",
    "hier. ms",
    "step ms",
    "images/s",
    "efficiency",
    "speed-up",
]
