"""Runs the tasks of `verify` in separate processes: records trainings and checks their traces.

Each function is the main function of a process. `send` sends `("step", n)` and `("warning", text)`
to the parent; `dataset` has the images, if they have been loaded before.
"""

import contextlib
import dataclasses
import fcntl
import functools
import math
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from app.devices import device_setup
from app.devices.local_workers import split_resources
from app.devices.worker_group import WorkerGroup
from app.options import Config, rules
from app.records.files import io_errors_as, remove
from app.runtime import console
from app.runtime.errors import DiskFullError
from app.runtime.processes import Channel
from app.verification.recorded import Checked, Recorded
from app.verification.split import Split
from app.verification.straggler import SendTime

if TYPE_CHECKING:  # They import TensorFlow, which `set_up` configures first.
    from app.data.dataset import ImageDataset
    from app.training.training_spec import TrainingSpec
    from strategies.base import Strategy

Send = Callable[[tuple], None]


def record_on_workers(
    send: Send, config: Config, num_steps: int, path: pathlib.Path, num_workers: int
) -> Recorded:
    """Trains `num_steps` steps with `num_workers` processes and writes one trace to `path`.

    Each worker writes the arrays of its own replicas. The traces are merged by files, independent
    of the all-reduce that is being verified.
    """
    from app.verification.trace import merge_traces

    with WorkerGroup(
        split_resources(num_workers, config), _record_as_worker, config, num_steps, path
    ) as group:
        while (message := group.receive())[0] == "message":
            send(message[1])
    per_worker = message[1]
    parts = [_worker_path(path, index) for index in range(len(per_worker))]
    merge_traces(parts, path)
    for part in parts:
        with io_errors_as(part):
            remove(part)
    send_sec = [
        [time for worker_times in times for time in worker_times]
        for times in zip(*(worker.send_sec for worker in per_worker), strict=True)
    ]
    return dataclasses.replace(per_worker[0], send_sec=send_sec)


def _record_as_worker(
    channel: Channel, config: Config, num_steps: int, path: pathlib.Path
) -> Recorded:
    return record(channel.send, config, num_steps, path)


def _worker_path(path: pathlib.Path, index: int) -> pathlib.Path:
    return path.with_name(f"{path.name}-{index}")


def record(
    send: Send,
    config: Config,
    num_steps: int,
    path: pathlib.Path,
    *,
    dataset: "ImageDataset | None" = None,
) -> Recorded:
    """Trains `num_steps` steps with the strategy of `config` and writes their trace to `path`.

    Args:
        send: called with progress messages.
        config: options of the training.
        num_steps: number of steps.
        path: directory of the trace.
        dataset: the images; None to load them.
    """
    devices, spec = set_up(send, config, dataset)
    if devices.workers:
        path = _worker_path(path, devices.workers.index)
    from app.training.all_reduce_self_test import run_all_reduce_self_test
    from app.training.fault_injection import inject_data_fault, inject_fault
    from app.verification.recorder import Recorder

    strategy = spec.build_strategy(devices)
    split = Split.of(strategy)  # As configured: a fault may change the actual split.
    run_all_reduce_self_test(strategy)
    batches, observer = spec.batches(), None
    if config.verification.fault:
        observer = inject_fault(
            config.verification.fault, strategy, batch_sizes=spec.batch_sizes(), num_steps=num_steps
        )
        observer.begin()
        batches = inject_data_fault(
            config.verification.fault,
            lambda seed: spec.batches(seed=seed),
            strategy,
            seed=config.training.seed,
        )
    _check_space(strategy, num_steps, path)
    recorder, iterator = Recorder(strategy, observer), strategy.distribute(batches)
    if not devices.workers:
        strategy.train_steps(iterator, 0)  # Compiles the step, while another process may train.
    with contextlib.nullcontext() if devices.workers else _lock(path.parent):
        send_sec = recorder.record(
            iterator, num_steps=num_steps, path=path, on_step=lambda step: send(("step", step))
        )
    has_batch_norm = any("/moving_" in name for name in strategy.variable_names)
    recorded = recorded_as(
        spec,
        devices,
        split,
        strategy.shard_weights,
        has_batch_norm=has_batch_norm,
        send_sec=send_sec,
    )
    return dataclasses.replace(recorded, skipped_steps=recorder.skipped_steps)


def record_on_one_device(
    send: Send,
    config: Config,
    num_steps: int,
    path: pathlib.Path,
    shard_weights: tuple[int, ...],
    *,
    dataset: "ImageDataset | None" = None,
) -> Recorded:
    """Records `single` with the BatchNorm of several shards, computed one after another."""
    devices, spec = set_up(send, config, dataset)
    from app.verification.reference import Reference
    from app.verification.shard_by_shard import effect_of_shards, train_shard_by_shard
    from app.verification.trace import Trace

    reference = Reference.of(spec, "float32")
    skipped_steps = train_shard_by_shard(
        reference,
        spec.batches().take(num_steps).as_numpy_iterator(),
        shard_weights=shard_weights,
        path=path,
        on_step=lambda step: send(("step", step)),
    )
    with Trace(path) as trace:
        images, labels = next(spec.batches().as_numpy_iterator())
        effect = effect_of_shards(reference, images, labels, trace, shard_weights)
    split = Split(num_replicas=1, num_shards=len(shard_weights), num_copies=1)
    recorded = recorded_as(
        spec, devices, split, shard_weights, has_batch_norm=True, effect_of_shards=effect
    )
    return dataclasses.replace(recorded, skipped_steps=skipped_steps)


def check(
    send: Send,
    config: Config,
    path: pathlib.Path,
    syncs_batch_norm: bool,
    communication_dtype: str,
    *,
    dataset: "ImageDataset | None" = None,
) -> Checked:
    """Checks a trace against the reference, and explains its first mismatch.

    Args:
        send: called with progress messages.
        config, path: options of the training, and directory of its trace.
        syncs_batch_norm: whether its BatchNorm was configured to normalise over the whole batch.
        communication_dtype: dtype of the gradient all-reduce.
        dataset: the images; None to load them.
    """
    _, spec = set_up(send, config, dataset)
    from app.verification.diagnosis import explain
    from app.verification.measurement import first_mismatch
    from app.verification.step_context import StepContext
    from app.verification.step_start import hash_training_examples
    from app.verification.trace import Trace
    from app.verification.trace_checker import TraceChecker

    def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
        return next(spec.batches(start_step=step - 1).as_numpy_iterator())

    checker = TraceChecker.of(
        spec, syncs_batch_norm=syncs_batch_norm, communication_dtype=communication_dtype
    )
    with Trace(path, syncs_batch_norm=syncs_batch_norm) as trace:
        batches = spec.batches().as_numpy_iterator()
        measurements = checker.check(trace, batches, on_step=lambda step: send(("step", step)))
        mismatch = first_mismatch(measurements)
        hashes = functools.partial(hash_training_examples, spec)
        context = StepContext(trace, measurements, batch, hashes, checker.reference64)
        return Checked(measurements, mismatch, explain(context, mismatch) if mismatch else None)


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


def recorded_as(
    spec: "TrainingSpec",
    devices: device_setup.Devices,
    split: Split,
    shard_weights: Sequence[int],
    *,
    has_batch_norm: bool,
    effect_of_shards: float | None = None,
    send_sec: Sequence[list[SendTime]] = (),
) -> Recorded:
    """Returns the description of a recording.

    Args:
        spec: specification of the training.
        devices: devices of the training; the reference uses the first one.
        split: split of the batch.
        shard_weights: relative sizes of the shards.
        has_batch_norm: whether the model has moving statistics.
        effect_of_shards: for the reference; see `Recorded`.
        send_sec: see `Recorded`.
    """
    from app.runtime.versions import versions

    is_reference = effect_of_shards is not None
    names = devices.names[:1] if is_reference else devices.names
    return Recorded(
        devices=names,
        **split._asdict(),
        shard_weights=list(shard_weights),
        simulated_devices=devices.simulated and len(names) > 1,
        dataset=spec.dataset.name,
        dataset_sha256=spec.dataset.sha256(),
        learning_rate=spec.learning_rate,
        num_train_examples=len(spec.dataset.train_images),
        has_batch_norm=has_batch_norm,
        is_reference=is_reference,
        effect_of_shards=effect_of_shards,
        send_sec=list(send_sec),
        versions=versions(),
    )
