"""Records trainings with strategies as traces, and checks each step, in separate processes.

Processes send `("step", n)`, first for each recorded and then for each checked step, and
`("warning", text)` to the parent.
"""

import dataclasses
import os
import pathlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from app.devices import device_setup
from app.devices.local_workers import WorkerGroup, split_resources
from app.options import Config
from app.options.names import SINGLE
from app.records.files import io_errors_as
from app.runtime import console
from app.runtime.processes import Channel
from app.runtime.versions import versions
from app.verification.output import Run
from lockstep.answer.verdict import Finding, finding_of
from lockstep.data import file as trace_file
from lockstep.data.trace import Trace
from lockstep.numeric.arrays import are_finite

if TYPE_CHECKING:  # They import TensorFlow, which `set_up` configures first.
    from app.data.dataset import ImageDataset
    from app.training.training_spec import TrainingSpec
    from app.verification.recorder import SendTime

Send = Callable[[tuple], None]
RECORDED = ("recorded",)  # Message: the trace is on disk.
Checked = tuple[pathlib.Path, Mapping[int, frozenset[int]]]  # A trace, and its `Run.exact`.
_LOSS_SCALE = "optimizer/loss_scale"  # Variable of the optimizer, with gradients in float16.


class Recorded(NamedTuple):
    """Describes what a training whose trace is on disk ran on.

    Attributes:
        devices: devices of all workers.
        simulated_devices: whether logical devices share a processor.
        send_sec: for each step and replica, seconds and seconds of processor time from the start of
            the step until the replica sent its last gradient.
    """

    devices: list[str]
    simulated_devices: bool
    send_sec: "Sequence[list[SendTime]]" = ()


def check_training(
    channel: Channel,
    config: Config,
    name: str,
    path: pathlib.Path,
    num_steps: int,
    *,
    recorded: Recorded | None = None,
    shard_weights: Sequence[int] = (),
    data: "ImageDataset | None" = None,
) -> Run:
    """Compares every step of a training with one device, and looks for a slow replica.

    Args:
        channel: gets messages; with `RECORDED`, the next training may begin. Sends once a list of
            `Checked`, the trainings that were checked before. A training here waits for it after
            its first step, which is traced and not timed.
        config: options of the training, or of any training with the same steps.
        name: name of the training.
        path: file of its trace.
        num_steps: number of steps.
        recorded: what it ran on; None to train with the strategy of `config` and write the trace.
        shard_weights: relative sizes of the shards; empty for those of `config`.
        data: the data of the training; None to load it.
    """
    from app.verification.strategy_oracle import StrategyOracle
    from lockstep.run import Proven, check_steps, verdict_of

    devices, spec = set_up(channel.send, config, data)
    before: list[Checked] = []

    def take_turn() -> None:
        before.extend(channel.receive())

    if recorded is None:
        recorded = _record(channel, spec, devices, num_steps, path, shard_weights, take_turn)
        channel.send(RECORDED)
    else:
        take_turn()
    trace = trace_file.load(path)
    num_threads = min(len(trace.shards), os.cpu_count() or 1)
    oracle = StrategyOracle(spec, trace, num_threads=num_threads)
    result = check_steps(
        trace,
        oracle,
        [list(spec.batch(step)) for step in trace.steps],
        proven=[Proven(trace_file.load(other), exact) for other, exact in before],
        on_step=lambda step: channel.send(("step", len(trace.steps) + step)),
    )
    verdict = verdict_of(trace, result, oracle, name=name, reference="training on one device")
    names = {step: f"step {step + 1}" for step in verdict.steps}
    findings = *verdict.findings, *_find_slow_replica(recorded, trace)
    about, skipped = trace.about, _skipped_steps(trace)
    return Run(
        dataclasses.replace(verdict, step_names=names, findings=findings),
        devices=recorded.devices,
        simulated_devices=recorded.simulated_devices,
        versions={**versions(), **about.versions},
        about=_split_text(name, trace, len(recorded.devices), skipped),
        facts={
            "num_shards": len(about.shards),
            "num_copies": about.num_copies,
            "shard_weights": [int(shard.weight) for shard in about.shards],
            "syncs_batch_norm": about.syncs_batch_norm,
            "skipped_steps": skipped,
            "send_sec": recorded.send_sec,
        },
        common_facts={
            "learning_rate": spec.learning_rate,
            "dataset": spec.dataset.name,
            "dataset_sha256": spec.dataset.sha256(),
            "num_train_examples": len(spec.dataset.train_images),
        },
        diverged_step=_diverged_step(trace),
        exact=result.exact,
    )


def record_on_workers(send: Send, config: Config, num_steps: int, path: pathlib.Path) -> Recorded:
    """Trains with several worker processes; each writes a trace of its replicas.

    The traces are put together from files, independent of the all-reduce that is being verified.
    """
    shares = split_resources(config.cluster.num_workers or 1, config)
    with WorkerGroup(shares, _record_as_worker, config, num_steps, path) as group:
        while (message := group.receive())[0] == "message":
            send(message[1])
    per_worker = message[1]
    per_step = zip(*(worker.send_sec for worker in per_worker), strict=True)
    send_sec = [[time for times in step for time in times] for step in per_step]
    return per_worker[0]._replace(send_sec=send_sec)


def _record_as_worker(
    channel: Channel, config: Config, num_steps: int, path: pathlib.Path
) -> Recorded:
    devices, spec = set_up(channel.send, config)
    assert devices.workers is not None
    own_path = path.with_name(f"{path.stem}.rank{devices.workers.index}.npz")
    return _record(channel, spec, devices, num_steps, own_path)


def set_up(
    send: Send, config: Config, data: "ImageDataset | None" = None
) -> "tuple[device_setup.Devices, TrainingSpec]":
    """Sets up TensorFlow and loads the data, unless it is given; sends warnings to the parent."""
    console.forward_warnings(lambda text: send(("warning", text)))
    devices = device_setup.set_up(config)
    import tensorflow as tf

    from app.data.dataset_loader import load_data
    from app.training.training_spec import TrainingSpec

    tf.config.experimental.enable_tensor_float_32_execution(False)
    return devices, TrainingSpec(config, data or load_data(config))


def _record(
    channel: Channel,
    spec: "TrainingSpec",
    devices: device_setup.Devices,
    num_steps: int,
    path: pathlib.Path,
    shard_weights: Sequence[int] = (),
    take_turn: Callable[[], None] = lambda: None,
) -> Recorded:
    """Trains and writes the trace of each step, with memory for one step.

    The first step is traced, and not timed; `take_turn` returns when nothing else computes.
    """
    from app.training.all_reduce_self_test import run_all_reduce_self_test
    from app.training.fault_injection import inject_fault
    from app.verification.recorder import StepRecorder, check_repeatable

    config, strategy = spec.config, spec.build_strategy(devices)
    strategy.shard_weights = list(shard_weights) or strategy.shard_weights
    check_repeatable(strategy.model)
    run_all_reduce_self_test(strategy)
    dtype = config.distribution.communication_dtype
    # As configured: a fault may change the actual split.
    recorder = StepRecorder(strategy, communication_dtype=dtype)
    batches = spec.batches()
    if fault := config.verification.fault:
        sizes, seed = spec.batch_sizes(), config.training.seed
        faulty = inject_fault(fault, strategy, batch_sizes=sizes, num_steps=num_steps)
        faulty.begin()
        recorder.inner = faulty
        batches = faulty.batches(lambda s: spec.batches(seed=s), seed)
    strategy.observer = recorder
    iterator = strategy.distribute(batches)
    channel.kept.append(iterator)
    times = []
    with io_errors_as(path), trace_file.Writer(path) as writer:
        trace = Trace(recorder.about(range(num_steps)), writer)
        for step in range(1, num_steps + 1):
            recorder.record_step(trace, step - 1, lambda: strategy.train_steps(iterator, 1))
            times.append(recorder.take_times())
            channel.send(("step", step))
            if step == 1:
                take_turn()
        writer.close(recorder.about(range(num_steps)))
    return Recorded(devices.names, devices.simulated and len(devices.names) > 1, times)


def _find_slow_replica(recorded: Recorded, trace: Trace) -> Iterator[Finding]:
    """Finds a replica for which the others had to wait in every step."""
    from app.verification.recorder import find_straggler

    weights = [0.0] * trace.about.num_replicas
    for shard in trace.about.shards:
        weights[shard.replica] += shard.weight
    if late := find_straggler(recorded.send_sec, weights):
        items = [f"replica {late[0]}"]
        yield finding_of("time", "slow_replica", late[1], trace.steps, items=items)


def _split_text(name: str, trace: Trace, num_devices: int, skipped: Sequence[int]) -> str:
    """Describes how a training is split over devices, and which steps it skipped."""
    num, num_replicas, texts = len(trace.shards), trace.about.num_replicas, []
    if name == SINGLE and num > 1:
        texts.append(
            f"one device, with BatchNorm over {num} shards one after another, as replicas and"
            " micro-batches have it (--batch_norm=average); `train --strategy=single`, with"
            " BatchNorm over the whole batch, is another training by design, not a fault"
        )
    elif not num == num_replicas == num_devices:
        each = f" of {num // num_replicas} micro-batches" if num > num_replicas else ""
        replicas = console.count(num_replicas, "replica")
        texts.append(f"{replicas}{each} on {console.count(num_devices, 'device')}")
    if skipped:
        texts.append(
            f"skipped {console.count(len(skipped), 'step')}, as a gradient overflowed in float16"
            f" ({', '.join(map(str, skipped))}); others may skip other steps"
        )
    return "; ".join(texts)


def _skipped_steps(trace: Trace) -> list[int]:
    """Returns the steps, from 1, whose update was skipped, which lowers the loss scale."""
    if _LOSS_SCALE not in trace.keys:
        return []
    index = trace.keys.index(_LOSS_SCALE)
    scales = [
        [(trace.arrays(position, kind, 0) or [])[index] for kind in ("before", "after")]
        for position in range(len(trace.steps))
    ]
    return [step for step, (before, after) in enumerate(scales, start=1) if after < before]


def _diverged_step(trace: Trace) -> int:
    """Returns the first step, from 1, with a loss or a variable that is not finite; 0 for none."""
    for position in range(len(trace.steps)):
        states = [trace.arrays(position, "after", copy) or [] for copy in trace.copies]
        losses = [trace.arrays(position, "loss", shard) or [] for shard in trace.shards]
        if not are_finite([a for arrays in (*states, *losses) for a in arrays if a is not None]):
            return position + 1
    return 0
