"""Runs the tasks of `verify` in separate processes: records trainings and checks their traces.

Each function is the main function of a process. `send` sends `("step", n)` and `("warning", text)`
to the parent; `dataset` has the images, if they have been loaded before.
"""

import contextlib
import dataclasses
import fcntl
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from app.devices import device_setup
from app.devices.local_workers import split_resources
from app.devices.worker_group import WorkerGroup
from app.options import Config, rules
from app.records.files import io_errors_as
from app.runtime import console
from app.runtime.errors import DiskFullError
from app.runtime.processes import Channel
from app.verification.recorded import Checked, Recorded
from lockstep import trace_file
from lockstep.arithmetic import add_named, are_finite, relative_norm
from lockstep.trace import Trace

if TYPE_CHECKING:  # They import TensorFlow, which `set_up` configures first.
    from app.data.dataset import ImageDataset
    from app.training.training_spec import TrainingSpec
    from app.verification.recorder import State, StepRecorder
    from app.verification.strategy_oracle import StrategyOracle
    from strategies.base import Strategy

Send = Callable[[tuple], None]


def record_on_workers(
    send: Send, config: Config, num_steps: int, path: pathlib.Path, num_workers: int
) -> Recorded:
    """Trains `num_steps` steps with `num_workers` processes; each writes a trace of its replicas.

    The traces are put together from files, independent of the all-reduce that is being verified.
    """
    with WorkerGroup(
        split_resources(num_workers, config), _record_as_worker, config, num_steps, path
    ) as group:
        while (message := group.receive())[0] == "message":
            send(message[1])
    per_worker = message[1]
    send_sec = [
        [time for worker_times in times for time in worker_times]
        for times in zip(*(worker.send_sec for worker in per_worker), strict=True)
    ]
    return dataclasses.replace(per_worker[0], send_sec=send_sec)


def _record_as_worker(
    channel: Channel, config: Config, num_steps: int, path: pathlib.Path
) -> Recorded:
    return record(channel.send, config, num_steps, path)


def record(
    send: Send,
    config: Config,
    num_steps: int,
    path: pathlib.Path,
    shard_weights: Sequence[int] = (),
    *,
    dataset: "ImageDataset | None" = None,
) -> Recorded:
    """Trains `num_steps` steps with the strategy of `config` and writes their trace to `path`.

    Args:
        send: called with progress messages.
        config: options of the training.
        num_steps: number of steps.
        path: file of the trace; with several workers, that of the whole trace.
        shard_weights: relative sizes of the shards; empty for those of `config`.
        dataset: the images; None to load them.
    """
    devices, spec = set_up(send, config, dataset)
    from app.training.all_reduce_self_test import run_all_reduce_self_test
    from app.training.fault_injection import inject_data_fault, inject_fault
    from app.verification.recorder import StepRecorder, check_repeatable

    strategy, fault = spec.build_strategy(devices), config.verification.fault
    strategy.shard_weights = list(shard_weights) or strategy.shard_weights
    check_repeatable(strategy.model)
    run_all_reduce_self_test(strategy)
    dtype = config.distribution.communication_dtype
    # As configured: a fault may change the actual split.
    recorder = StepRecorder(strategy, communication_dtype=dtype)
    batches = spec.batches()
    if fault:
        observer = inject_fault(
            fault, strategy, batch_sizes=spec.batch_sizes(), num_steps=num_steps
        )
        observer.begin()
        recorder.inner, seed = observer, config.training.seed
        batches = inject_data_fault(fault, lambda s: spec.batches(seed=s), strategy, seed=seed)
    strategy.observer = recorder
    _check_space(strategy, num_steps, path)
    if devices.workers:
        path = path.with_name(f"{path.stem}.rank{devices.workers.index}.npz")
    recording = _Recording(strategy, recorder, path)
    iterator = strategy.distribute(batches)
    if not devices.workers:
        strategy.train_steps(iterator, 0)  # Compiles the step, while another process may train.
    with contextlib.nullcontext() if devices.workers else _lock(path.parent), io_errors_as(path):
        recording.run(iterator, num_steps, lambda step: send(("step", step)))
    return dataclasses.replace(
        recorded_as(spec, devices),
        about=recording.trace.about,
        has_batch_norm=any("/moving_" in name for name in strategy.variable_names),
        send_sec=recording.times,
        skipped_steps=recording.skipped_steps,
        diverged_step=recording.diverged_step,
    )


class _Recording:
    """Trains and writes the trace of each step, with memory for one step.

    Attributes:
        trace: the trace, whose arrays are in the file.
        times: when each replica sent its gradients, for each step.
        skipped_steps, diverged_step: see `Recorded`.
    """

    def __init__(self, strategy: "Strategy", recorder: "StepRecorder", path: pathlib.Path):
        self._strategy, self._recorder, self._path = strategy, recorder, path
        self.times: list[list[tuple[float, float]]] = []
        self.skipped_steps: list[int] = []
        self.diverged_step = 0

    def run(self, iterator: Iterator, num_steps: int, on_step: Callable[[int], None]) -> None:
        """Trains `num_steps` steps."""
        from strategies.loss_scale import loss_scale_of

        strategy, recorder = self._strategy, self._recorder
        with trace_file.Writer(self._path) as writer:
            self.trace = trace = Trace(recorder.about(range(num_steps)), writer)
            state = recorder.state()
            for position in range(num_steps):
                state.put(trace, position, "before")
                start, busy = time.monotonic(), time.process_time()
                scale = loss_scale_of(strategy.optimizer)
                totals = strategy.train_steps(iterator, 1)
                if scale is not None and loss_scale_of(strategy.optimizer) < scale:
                    self.skipped_steps.append(position + 1)
                recorder.put_step(trace, position)
                state = recorder.state()
                state.put(trace, position, "after")
                sent = recorder.take_times()
                self.times.append([(sec - start, cpu - busy) for sec, cpu in sent])
                is_finite = math.isfinite(totals.loss_sum) and _is_finite(state)
                if not is_finite and not self.diverged_step:
                    self.diverged_step = position + 1
                on_step(position + 1)
            trace.describe(recorder.about(range(num_steps)))
            writer.close(trace.about)


def _is_finite(state: "State") -> bool:
    return all(map(are_finite, state.copies.values()))


def check(
    send: Send,
    config: Config,
    path: pathlib.Path,
    name: str,
    *,
    dataset: "ImageDataset | None" = None,
) -> Checked:
    """Checks a trace against one device.

    Args:
        send: called with progress messages.
        config: options of the training.
        path: file of its trace.
        name: name of the training.
        dataset: the images; None to load them.
    """
    _, spec = set_up(send, config, dataset)
    from app.verification.strategy_oracle import StrategyOracle
    from lockstep.engine import check

    trace = trace_file.load(path)
    oracle = StrategyOracle.of(spec, trace.about)
    verdict = check(
        trace,
        oracle,
        batches=[list(spec.batch(step)) for step in trace.steps],
        name=name,
        reference="training on one device",
        on_step=lambda step: send(("step", step)),
    )
    names = {step: f"step {step + 1}" for step in verdict.steps}
    verdict = dataclasses.replace(verdict, step_names=names)
    in_shards = name == "single" and len(trace.shards) > 1
    return Checked(verdict, _effect_of_shards(trace, oracle) if in_shards else None)


def _effect_of_shards(trace: Trace, oracle: "StrategyOracle") -> float:
    """Returns how far the first gradient is from that of BatchNorm over the whole batch."""
    from lockstep.context import Context

    context = Context(trace, 0, oracle)
    state = context.state(0)
    if oracle.scales_loss:  # The recorded gradients may overflow.
        state = {**state, "optimizer/loss_scale": np.array(1, np.float32)}
    num, whole = sum(context.sizes), [np.concatenate(a) for a in zip(*context.data, strict=True)]
    parts = [
        oracle.compute(context.ask(s, state=state, scales=(size / num, 1.0))).raw
        for s, size in enumerate(context.sizes)
    ]
    together = context.ask(0, state=state, data=whole, scales=(1.0, 1.0))
    return relative_norm(add_named(parts), oracle.compute(together).raw)


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


def set_up(
    send: Send, config: Config, dataset: "ImageDataset | None"
) -> "tuple[device_setup.Devices, TrainingSpec]":
    """Sets up TensorFlow and loads the data; sends warnings to the parent."""
    console.forward_warnings(lambda text: send(("warning", text)))
    devices = device_setup.set_up(config)
    import tensorflow as tf

    from app.training.training_spec import TrainingSpec, load_data

    tf.config.experimental.enable_tensor_float_32_execution(False)
    dataset = dataset or load_data(config)
    rules.check_shards(config, len(devices.names), len(dataset.train_images))
    return devices, TrainingSpec(config, dataset)


def recorded_as(spec: "TrainingSpec", devices: device_setup.Devices) -> Recorded:
    """Returns what a training is recorded with; its trace is yet to be described."""
    from app.runtime.versions import versions
    from lockstep.trace import About

    return Recorded(
        about=About("lockstep", 1),
        devices=devices.names,
        simulated_devices=devices.simulated and len(devices.names) > 1,
        dataset=spec.dataset.name,
        dataset_sha256=spec.dataset.sha256(),
        learning_rate=spec.learning_rate,
        num_train_examples=len(spec.dataset.train_images),
        has_batch_norm=False,
        versions=versions(),
    )
