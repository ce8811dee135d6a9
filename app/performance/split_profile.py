"""Profiles a split training in a separate process: traffic, memory and idle time."""

import contextlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from app.config import TrainConfig
from app.devices import device_setup
from app.performance.pipeline_timeline import (
    bubble,
    idle_share,
    mean_task_secs,
    simulate,
    theoretical_in_flight,
)
from app.performance.split_records import (
    HeldState,
    PipelineProfile,
    SplitProfile,
    TimedSteps,
    Traffic,
)
from app.runtime import console

if TYPE_CHECKING:  # They import TensorFlow, which `_prepare` configures first.
    from app.training.training_spec import TrainingSpec
    from strategies.base import Strategy
    from strategies.pipeline import PipelineStrategy

PADDING_SEC = 0.02, 0.04  # A backward pass computes about twice as much as a forward pass.
_TIMED_STEPS = 3
_PADDED_EXAMPLES = 2  # Per micro-batch, so that computation is negligible.


def profile_split(send: Callable[[Any], None], config: TrainConfig) -> SplitProfile:
    """Builds a training, counts what a step sends, and times the tasks of a pipeline.

    Args:
        send: sends messages to the waiting process.
        config: options of the training.
    """
    devices, spec = _prepare(send, config)
    from strategies.pipeline import PipelineStrategy

    strategy = spec.build_strategy(devices)
    (batch,) = spec.batches().take(1)
    pipeline = None
    traffic, held = traffic_of(strategy, batch), held_state(strategy)
    if isinstance(strategy, PipelineStrategy):
        pipeline = _profile_pipeline(strategy, config, batch, simulated=devices.simulated)
    return SplitProfile(traffic, held, pipeline)


def time_padded_pipeline(send: Callable[[Any], None], config: TrainConfig) -> TimedSteps:
    """Times the tasks of a pipeline whose stages are padded by sleeping."""
    devices, spec = _prepare(send, config)
    (batch,) = spec.batches().take(1)
    return _time(spec.build_strategy(devices), batch, padding_sec=PADDING_SEC)


def _prepare(
    send: Callable[[Any], None], config: TrainConfig
) -> "tuple[device_setup.Devices, TrainingSpec]":
    """Sets up TensorFlow, with a thread for every task that may sleep, and loads the data."""
    console.forward_warnings(lambda text: send(("warning", text)))
    devices = device_setup.set_up(config)
    import tensorflow as tf

    if devices.simulated:
        with contextlib.suppress(RuntimeError):  # Fixed already: a second command of a process.
            tf.config.threading.set_inter_op_parallelism_threads(2 * len(devices.names) + 2)
    from app.training.training_spec import TrainingSpec, load_data

    dataset = load_data(config)
    config.check_shards(len(devices.names), len(dataset.train_images))
    return devices, TrainingSpec(config, dataset)


def traffic_of(strategy: "Strategy", batch: Sequence[Any]) -> Traffic:
    """Counts the bytes of a step, and computes them by formula."""
    from app.performance.traffic_count import NotCountableError, count_traffic
    from app.performance.traffic_formula import NoFormulaError, terms_of

    counted, terms, notes = None, None, []
    try:
        counted = count_traffic(strategy, batch)
    except NotCountableError as error:
        notes.append(f"not counted: {error}")
    try:
        terms = terms_of(strategy, len(batch[0]))
    except NoFormulaError as error:
        notes.append(f"no formula: {error}")
    by_formula: Counter = Counter()
    for term in terms or []:
        by_formula.update(term.links)
    links = counted.links if counted else {}
    return Traffic(
        terms=[(term.name, term.formula, term.size_bytes) for term in terms or []],
        formula_bytes=None if terms is None else sum(by_formula.values()),
        counted_bytes=sum(links.values()) if counted else None,
        input_bytes=sum(counted.inputs.values()) if counted else None,
        links=[
            (sender, receiver, by_formula[sender, receiver], links.get((sender, receiver), 0))
            for sender, receiver in sorted({*links, *by_formula})
        ],
        note="; ".join(notes),
    )


def held_state(strategy: "Strategy") -> list[HeldState]:
    """Sums the variables on each device, unsplit ones and parts."""
    kinds: dict[Any, tuple[str, Any]] = {}  # By reference, each variable once.

    def add(kind: str, variable: Any) -> None:
        inner = getattr(variable, "parts", None) or getattr(variable, "copies", None)
        for each in inner or [variable]:
            kinds.setdefault(each.ref(), (kind, each))

    for part in getattr(strategy, "parts", []):  # Of `sharded`, besides whole weights.
        for weight in part.weights:
            add("weights", weight.value)
    for variables in strategy.shard_statistics():
        for variable in variables.values():
            add("statistics", variable)
    for copy in strategy.copies():
        for name, variable in copy.items():
            add("optimizer" if name.startswith("optimizer/") else "weights", variable)
    sizes: Counter = Counter()
    for kind, variable in kinds.values():
        number = variable.device.rpartition("device:")[2]
        sizes[number, kind] += variable.shape.num_elements() * variable.dtype.size
    held = []
    for device in strategy.devices:
        number = device.rpartition("device:")[2]
        of = [sizes[number, kind] for kind in ("weights", "optimizer", "statistics")]
        held.append(HeldState(device, *of))
    return held


def _profile_pipeline(
    strategy: "PipelineStrategy", config: TrainConfig, batch: Sequence[Any], *, simulated: bool
) -> PipelineProfile:
    from strategies.cuts import stage_flops
    from strategies.schedules import SCHEDULES, in_time_slots

    stages = strategy.pipelines[0].stages
    flops = [stage_flops(stage.calls) for stage in stages]
    numbers = len(stages), config.micro_batches
    measured = _time(strategy, batch)
    secs, padded = mean_task_secs(measured.tasks), None
    if simulated:
        number = _PADDED_EXAMPLES * strategy.num_shards
        padded = _time(strategy, [part[:number] for part in batch], padding_sec=PADDING_SEC)
    return PipelineProfile(
        schedule=config.schedule,
        num_micro_batches=config.micro_batches,
        stages=[
            (stage.calls[0].layer.name, stage.calls[-1].layer.name, own / sum(flops))
            for stage, own in zip(stages, flops, strict=True)
        ],
        slots=[
            [(task.stage, task.is_forward, task.micro_batch) for task in slot]
            for slot in in_time_slots(SCHEDULES[config.schedule], *numbers)
        ],
        bubble=bubble(*numbers),
        in_flight=theoretical_in_flight(config.schedule, *numbers),
        measured=measured,
        simulated_idle=idle_share(simulate(strategy.tasks, len(stages), secs)),
        padded=padded,
    )


def _time(
    strategy: "Strategy", batch: Sequence[Any], *, padding_sec: tuple[float, float] | None = None
) -> TimedSteps:
    """Times the tasks of some steps on one batch."""
    import tensorflow as tf

    from app.performance.task_clock import NO_PADDING, TaskClock, time_tasks

    if not isinstance(strategy.observer, TaskClock):
        strategy.observer = TaskClock()
    strategy.observer.padding_sec = padding_sec or NO_PADDING
    iterator = strategy.distribute(tf.data.Dataset.from_tensors(tuple(batch)).repeat())
    return TimedSteps.of(time_tasks(strategy, iterator, strategy.observer, _TIMED_STEPS))
