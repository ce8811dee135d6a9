"""Records trainings with strategies as traces, and checks each step, in separate processes.

The functions with an argument `send` are the main functions of processes. `send` sends
`("step", n)`, `("warning", text)` and `("recorded", recorded)` to the parent.
"""

import contextlib
import dataclasses
import fcntl
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from app.devices import device_setup
from app.devices.local_workers import split_resources
from app.devices.worker_group import WorkerGroup
from app.options import Config, rules
from app.records.files import io_errors_as
from app.runtime import console
from app.runtime.errors import DiskFullError
from app.runtime.processes import Channel
from app.runtime.versions import versions
from lockstep import trace_file
from lockstep.arithmetic import are_finite
from lockstep.trace import About, Trace
from lockstep.verdict import Verdict

if TYPE_CHECKING:  # They import TensorFlow, which `set_up` configures first.
    from app.training.training_spec import TrainingSpec
    from app.verification.recorder import SendTime
    from strategies.base import Strategy
    from strategies.step_totals import StepTotals

Send = Callable[[tuple], None]


@dataclasses.dataclass(frozen=True)
class Recorded:
    """A training whose trace is on disk.

    Attributes:
        name: name of the strategy or framework.
        devices: devices of all workers.
        simulated_devices: whether logical devices share a processor.
        dataset: name of the dataset.
        dataset_sha256: hash of all images and labels.
        learning_rate: peak learning rate.
        num_train_examples: number of training examples.
        has_batch_norm: whether the model has moving statistics.
        versions: versions of the software that affects the results.
        about: description of its trace.
        send_sec: for each step and replica, seconds and seconds of processor time from the start of
            the step until the replica sent its last gradient.
        skipped_steps: steps, from 1, that were skipped because a gradient overflowed in float16.
        diverged_step: the first step, from 1, after which the loss or a variable is not finite; 0
            for none.
    """

    name: str
    devices: list[str]
    simulated_devices: bool
    dataset: str
    dataset_sha256: str
    learning_rate: float
    num_train_examples: int
    has_batch_norm: bool
    versions: dict[str, str]
    about: About = dataclasses.field(default_factory=lambda: About("lockstep", 1))
    send_sec: "list[list[SendTime]]" = dataclasses.field(default_factory=list)
    skipped_steps: list[int] = dataclasses.field(default_factory=list)
    diverged_step: int = 0

    @property
    def shard_weights(self) -> tuple[int, ...]:
        """Relative sizes of the shards."""
        return tuple(int(shard.weight) for shard in self.about.shards)

    @property
    def replica_weights(self) -> list[int]:
        """Relative sizes of the replicas' parts of a batch."""
        size = len(self.about.shards) // self.about.num_replicas
        weights = self.shard_weights
        return [sum(weights[i : i + size]) for i in range(0, len(weights), size)]

    @property
    def normalised_by(self) -> tuple[int, ...]:
        """The sizes of the parts of a batch that BatchNorm normalises; empty without BatchNorm."""
        if not self.has_batch_norm:
            return ()
        return (1,) if self.about.syncs_batch_norm else self.shard_weights


def record_and_check(
    send: Send,
    config: Config,
    num_steps: int,
    path: pathlib.Path,
    shard_weights: Sequence[int] = (),
) -> Verdict:
    """Trains with the strategy of `config`, writes the trace to `path`, and checks every step.

    Args:
        send: called with messages.
        config: options of the training.
        num_steps: number of steps.
        path: file of the trace.
        shard_weights: relative sizes of the shards; empty for those of `config`.
    """
    devices, spec = set_up(send, config)
    recorded = _record(send, spec, devices, num_steps, path, shard_weights)
    send(("recorded", recorded))
    return _check(send, spec, recorded, path)


def check_recorded(send: Send, config: Config, recorded: Recorded, path: pathlib.Path) -> Verdict:
    """Checks every step of a trace; `config` is that of any training with the same steps."""
    _, spec = set_up(send, config)
    return _check(send, spec, recorded, path)


def record_on_workers(
    send: Send, config: Config, num_steps: int, path: pathlib.Path, num_workers: int
) -> Recorded:
    """Trains `num_steps` steps with `num_workers` processes; each writes a trace of its replicas.

    The traces are put together from files, independent of the all-reduce that is being verified.
    """
    shares = split_resources(num_workers, config)
    with WorkerGroup(shares, _record_as_worker, config, num_steps, path) as group:
        while (message := group.receive())[0] == "message":
            send(message[1])
    per_worker = message[1]
    per_step = zip(*(worker.send_sec for worker in per_worker), strict=True)
    send_sec = [[time for times in step for time in times] for step in per_step]
    return dataclasses.replace(per_worker[0], send_sec=send_sec)


def _record_as_worker(
    channel: Channel, config: Config, num_steps: int, path: pathlib.Path
) -> Recorded:
    devices, spec = set_up(channel.send, config)
    assert devices.workers is not None
    own_path = path.with_name(f"{path.stem}.rank{devices.workers.index}.npz")
    return _record(channel.send, spec, devices, num_steps, own_path)


def set_up(send: Send, config: Config) -> "tuple[device_setup.Devices, TrainingSpec]":
    """Sets up TensorFlow and loads the data; sends warnings to the parent."""
    console.forward_warnings(lambda text: send(("warning", text)))
    devices = device_setup.set_up(config)
    import tensorflow as tf

    from app.data.dataset_loader import load_data
    from app.training.training_spec import TrainingSpec

    tf.config.experimental.enable_tensor_float_32_execution(False)
    dataset = load_data(config)
    rules.check_shards(config, len(devices.names), len(dataset.train_images))
    return devices, TrainingSpec(config, dataset)


def recorded_as(
    name: str, spec: "TrainingSpec", devices: device_setup.Devices, variable_names: Sequence[str]
) -> Recorded:
    """Returns what is known of a training before its steps are recorded."""
    return Recorded(
        name=name,
        devices=devices.names,
        simulated_devices=devices.simulated and len(devices.names) > 1,
        dataset=spec.dataset.name,
        dataset_sha256=spec.dataset.sha256(),
        learning_rate=spec.learning_rate,
        num_train_examples=len(spec.dataset.train_images),
        has_batch_norm=any("/moving_" in name for name in variable_names),
        versions=versions(),
    )


def _record(
    send: Send,
    spec: "TrainingSpec",
    devices: device_setup.Devices,
    num_steps: int,
    path: pathlib.Path,
    shard_weights: Sequence[int] = (),
) -> Recorded:
    """Trains and writes the trace of each step, with memory for one step."""
    from app.training.all_reduce_self_test import run_all_reduce_self_test
    from app.training.fault_injection import inject_data_fault, inject_fault
    from app.verification.recorder import StepRecorder, check_repeatable
    from strategies.loss import loss_scale_of

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
        recorder.inner = inject_fault(fault, strategy, batch_sizes=sizes, num_steps=num_steps)
        recorder.inner.begin()
        batches = inject_data_fault(fault, lambda s: spec.batches(seed=s), strategy, seed=seed)
    strategy.observer = recorder
    _check_space(strategy, num_steps, path)
    iterator = strategy.distribute(batches)
    if not devices.workers:
        strategy.train_steps(iterator, 0)  # Compiles the step, while another process may train.

    def train() -> "StepTotals":
        return strategy.train_steps(iterator, 1)

    times, skipped, diverged_step = [], [], 0
    alone = contextlib.nullcontext() if devices.workers else _lock(path.parent)
    with alone, io_errors_as(path), trace_file.Writer(path) as writer:
        trace = Trace(recorder.about(range(num_steps)), writer)
        for step in range(1, num_steps + 1):
            scale = loss_scale_of(strategy.optimizer)
            totals = recorder.record_step(trace, step - 1, train)
            times.append(recorder.take_times())
            if scale is not None and loss_scale_of(strategy.optimizer) < scale:
                skipped.append(step)
            is_finite = all(map(are_finite, strategy.states.per_copy()))
            if not (is_finite and math.isfinite(totals.loss_sum)) and not diverged_step:
                diverged_step = step
            send(("step", step))
        about = recorder.about(range(num_steps))
        writer.close(about)
    recorded = recorded_as(
        config.distribution.strategy, spec, devices, strategy.states.variable_names
    )
    return dataclasses.replace(
        recorded, about=about, send_sec=times, skipped_steps=skipped,
        diverged_step=diverged_step,
    )  # fmt: skip


def _check(send: Send, spec: "TrainingSpec", recorded: Recorded, path: pathlib.Path) -> Verdict:
    """Compares every step with one device, and looks for a slow replica."""
    from app.verification.recorder import find_straggler
    from app.verification.strategy_oracle import StrategyOracle
    from lockstep.engine import check
    from lockstep.verdict import FAULT, Finding

    trace = trace_file.load(path)
    verdict = check(
        trace,
        StrategyOracle.of(spec, trace),
        batches=[list(spec.batch(step)) for step in trace.steps],
        name=recorded.name,
        reference="training on one device",
        on_step=lambda step: send(("step", step)),
    )
    findings = list(verdict.findings)
    if late := find_straggler(recorded.send_sec, recorded.replica_weights):
        items = (f"replica {late.replica_id}",)
        findings.append(Finding("time", FAULT, "slow_replica", late.text, verdict.steps, items))
    names = {step: f"step {step + 1}" for step in verdict.steps}
    return dataclasses.replace(verdict, step_names=names, findings=tuple(findings))


@contextlib.contextmanager
def _lock(directory: pathlib.Path) -> Iterator[None]:
    """Waits until no other process trains for a trace in this directory, to time steps alone."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # A file system without locks.
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # The kernel releases it when the process ends.
        yield
    finally:
        os.close(descriptor)


def _check_space(strategy: "Strategy", num_steps: int, path: pathlib.Path) -> None:
    """Rejects a trace that does not fit on the disk, before a step is run."""
    state_bytes = sum(v.shape.num_elements() * v.dtype.size for v in strategy.copies()[0].values())
    weight_bytes = 4 * sum(math.prod(v.shape) for v in strategy.model.trainable_variables)
    # Gradients of each shard, their sum, and the state.
    needed = num_steps * ((strategy.num_shards + 1) * weight_bytes + state_bytes)
    free = shutil.disk_usage(path.parent).free
    if needed > free:
        raise DiskFullError(
            f"--steps={num_steps} needs {needed:,} bytes in {path.parent} for the trace of each"
            f" strategy, {free:,} are free; use fewer --steps or another --out"
        )
