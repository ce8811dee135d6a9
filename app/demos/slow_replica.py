"""`demo slow_replica`: shows how one slow device affects the others, and what would help."""

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.config import DemoConfig, TrainConfig
from app.config.fault import MIN_STRAGGLER_STEPS, Fault
from app.demos import demo_setup, presentation
from app.devices.device_setup import Devices
from app.performance import interval
from app.performance.interval import Interval
from app.runtime import console
from app.runtime.progress_bar import StepProgress

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from app.data.dataset import ImageDataset
    from strategies.base import Strategy

_ROUNDS = 8
_STEPS_PER_BLOCK = 10
_RECORDED_STEPS = 2 * MIN_STRAGGLER_STEPS + 1  # The first step compiles.


def run(config: DemoConfig) -> None:
    """Times steps with and without a device that takes twice as long."""
    prepared = demo_setup.set_up(config)
    from app.training.training_spec import load_data

    training = demo_setup.training(config)
    dataset = load_data(training)
    slow = len(prepared.names) - 1
    presentation.begin(
        f"One device, {prepared.names[slow]}, is made to take about twice as long for its"
        " shard as the others. This shows what that costs.",
        prepared,
    )
    plain, plain_iterator = demo_setup.create(training, prepared, dataset)[1:]
    send_secs = record_send_times(training, prepared, dataset, None)
    wait_ms = max(1, round(1000 * max(send_secs)))
    fault = Fault("slow_replica", {"replica": slow, "ms": wait_ms})
    slowed, slowed_iterator = create_faulty(training, prepared, dataset, fault)
    plain_ms, slow_ms = time_in_turn([(plain, plain_iterator), (slowed, slowed_iterator)])
    send_secs = record_send_times(training, prepared, dataset, fault)
    _show_step(fault, plain_ms, slow_ms, prepared.simulated)
    from strategies.collectives import shard_sizes

    shards = shard_sizes(training.global_batch_size, len(prepared.names))
    _show_division(prepared, shards, send_secs)


def create_faulty(
    training: TrainConfig, prepared: Devices, dataset: "ImageDataset", fault: Fault
) -> "tuple[Strategy, Any]":
    """Returns a strategy with a slow replica, and its iterator."""
    from app.training.fault_injection import inject_fault

    spec, strategy, iterator = demo_setup.create(training, prepared, dataset)
    inject_fault(fault, strategy, batch_sizes=spec.batch_sizes(), num_steps=spec.num_steps)
    return strategy, iterator


def record_send_times(
    training: TrainConfig, prepared: Devices, dataset: "ImageDataset", fault: Fault | None
) -> list[float]:
    """Returns the seconds from the start of a step until each replica sent its gradients.

    Medians over some steps of a separate training. Recording takes time, but not between these two
    moments.
    """
    from app.training.fault_injection import FaultyObserver

    _, strategy, iterator = demo_setup.create(training, prepared, dataset)
    inner = FaultyObserver(fault, strategy) if fault else None
    with demo_setup.recorded(strategy, iterator, num_steps=_RECORDED_STEPS, inner=inner) as (
        _,
        times,
    ):
        return [statistics.median(sec for sec, _ in of) for of in zip(*times[1:], strict=True)]


def time_in_turn(trainings: Sequence[tuple]) -> list[Interval]:
    """Times blocks of steps of each training in turn; returns milliseconds per step."""
    step_ms: list[list[float]] = [[] for _ in trainings]
    for strategy, iterator in trainings:
        strategy.train_steps(iterator, _STEPS_PER_BLOCK)  # Compile and warm up.
    with StepProgress(_ROUNDS) as progress:
        progress.start(f"timing both in turn, {_ROUNDS} times {_STEPS_PER_BLOCK} steps")
        for number in range(_ROUNDS):
            order = range(len(trainings))
            for position in order if number % 2 == 0 else reversed(order):
                strategy, iterator = trainings[position]
                start = time.perf_counter()
                strategy.train_steps(iterator, _STEPS_PER_BLOCK)
                sec = time.perf_counter() - start
                step_ms[position].append(1000 * sec / _STEPS_PER_BLOCK)
            progress.message(("step", number + 1))
    console.say()
    return [interval.median(values) for values in step_ms]


def divide_by_rate(shards: Sequence[int], secs: Sequence[float]) -> tuple[list[int], float]:
    """Splits a batch so that all replicas finish together, if time is proportional to size.

    Args:
        shards: number of examples of each replica.
        secs: seconds that each replica took for them.

    Returns:
        New sizes with the same sum, and the seconds that the slowest replica would take.
    """
    rates = [shard / sec for shard, sec in zip(shards, secs, strict=True)]
    exact = [sum(shards) * rate / sum(rates) for rate in rates]
    sizes = [int(size) for size in exact]
    # The remainder of rounding down goes to the replicas that lost most.
    by_rest = sorted(range(len(exact)), key=lambda r: sizes[r] - exact[r])
    for replica_id in by_rest[: sum(shards) - sum(sizes)]:
        sizes[replica_id] += 1
    return sizes, max(size / rate for size, rate in zip(sizes, rates, strict=True))


def _show_step(fault: Fault, plain: Interval, slow: Interval, simulated: bool) -> None:
    presentation.show(
        f"milliseconds of a step, medians of {_ROUNDS} blocks in turn, with 95 % intervals",
        ["training", "ms of a step"],
        [
            ["all devices alike", presentation.whole(plain)],
            [
                f"replica {fault.parameters['replica']} waits {fault.parameters['ms']} ms",
                presentation.whole(slow),
            ],
        ],
        simulated=simulated,
    )


def _show_division(prepared: Devices, shards: list[int], send_secs: list[float]) -> None:
    """Prints which replicas wait, and the split of the batch that would avoid it."""
    sizes, after_sec = divide_by_rate(shards, send_secs)
    last = max(send_secs)
    rows = [
        [
            name,
            shard,
            f"{1000 * sec:.0f}",
            f"{1000 * (last - sec):.0f}",
            f"{shard / sec:,.0f}",
            size,
            f"{1000 * size * sec / shard:.0f}",
        ]
        for name, shard, sec, size in zip(prepared.names, shards, send_secs, sizes, strict=True)
    ]
    presentation.show(
        "until each device sends its gradient, and shards with which all would send at the"
        " same time",
        ["on", "images", "sends after, ms", "then waits, ms", "images/s", "better", "after, ms"],
        rows,
        simulated=prepared.simulated,
    )
    presentation.end(
        "The all-reduce needs the gradients of all devices, so a step takes as long as the"
        " slowest one: all others wait in every step. One slow device slows down all of"
        " them.",
        f"With the batch divided by the measured speeds, {' and '.join(map(str, sizes))}"
        f" images instead of {' and '.join(map(str, shards))}, all devices would send after"
        f" {1000 * after_sec:.0f} ms instead of {1000 * last:.0f}: {last / after_sec:.2f}"
        " times as fast. (This is computed, not run, and assumes that time is proportional"
        " to the shard; the delay injected here is fixed.) The result would be the same:"
        " each loss is divided by the size of the whole batch, so uneven shards are exact.",
        then=[
            "verify --inject=slow_replica --steps=5    (names the straggler)",
            "demo split_batch",
        ],
    )
