"""Runs the process of a case: builds a training, warms up, and times blocks of steps on demand."""

import os
import statistics
import time
from typing import TYPE_CHECKING, Any

from app.devices import device_setup
from app.performance.all_reduce_model import AllReduceTime
from app.performance.case import Block, Case, Facts
from app.performance.peak_memory import PeakMemory, PeakMemoryMeter
from app.runtime import console, run_context
from app.runtime.processes import Channel

if TYPE_CHECKING:  # Not imported before its devices are set up.
    import tensorflow as tf

    from app.training.training_spec import TrainingSpec
    from strategies.base import Strategy

_WARM_UP_STEPS = 3
_SCALES = (1 / 64, 1 / 8, 4.0, 16.0)  # Factors on the gradients' size.
_LARGEST_ALL_REDUCE_BYTES = 64 << 20
_ALL_REDUCE_SEC, _ALL_REDUCE_REPEATS = 0.1, 5
BLOCK_SEC = 2.0  # Long enough to average out the scheduler's time slices.


def sample(channel: Channel, case: Case) -> PeakMemory:
    """Times blocks until it receives None.

    Sends `Facts` and the number of steps per block. Then, for each number of steps that it
    receives, sends a `Block`; for "all_reduce", sends a list of `AllReduceTime`; for None, ends.

    Returns:
        Its peak memory.
    """
    start = time.monotonic()
    if case.cores and hasattr(os, "sched_setaffinity"):  # Before TensorFlow counts the cores.
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: case.cores])
    console.forward_warnings(lambda text: channel.send(("warning", text)))
    prepared = device_setup.set_up(case.config)

    from app.training.all_reduce_self_test import run_all_reduce_self_test
    from app.training.training_spec import TrainingSpec, load_data

    dataset = load_data(case.config)
    case.config.check_shards(len(prepared.names), len(dataset.train_images))
    spec = TrainingSpec(case.config, dataset)
    strategy = spec.build_strategy(prepared, all_reduce="none" if case.no_sync else None)
    run_all_reduce_self_test(strategy)
    batches = spec.batches() if case.reads_input else repeat_one_batch(spec)
    iterator = strategy.distribute(batches)
    strategy.train_steps(iterator, 0)
    memory = PeakMemoryMeter(strategy.local_devices)
    strategy.train_steps(iterator, 1)  # Only an actual step makes XLA compile.
    compile_sec = time.monotonic() - start
    channel.send(("facts", _facts(spec, strategy, prepared, compile_sec)))

    step_sec = _warm_up(strategy, iterator)
    channel.send(("ready", max(1, round(BLOCK_SEC / step_sec))))
    while request := channel.receive():
        if request == "all_reduce":
            channel.send(("all_reduce", time_all_reduce(strategy)))
        else:
            channel.send(("block", _time_block(strategy, iterator, request)))
    # Deleting an iterator of MirroredStrategy can take 30 s; it is kept until the process ends.
    run_context.required().keep(iterator)
    return memory.peak()


def repeat_one_batch(spec: "TrainingSpec") -> "tf.data.Dataset":
    """Returns a dataset that repeats the first batch of a training, at no cost."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    (batch,) = spec.batches().take(1)
    return tf.data.Dataset.from_tensors(batch).repeat().with_options(options)


def _warm_up(strategy: "Strategy", iterator: Any) -> float:
    """Runs the first steps, which are slower; returns the seconds of a later step."""
    strategy.train_steps(iterator, _WARM_UP_STEPS)
    return _time_block(strategy, iterator, _WARM_UP_STEPS).step_sec


def _time_block(strategy: "Strategy", iterator: Any, num_steps: int) -> Block:
    tracings = strategy.num_tracings
    start = time.perf_counter()
    totals = strategy.train_steps(iterator, num_steps)  # Numbers: the last step is done.
    # Without an all-reduce, workers do not wait for each other; the slowest determines the time.
    (sec,) = strategy.workers.all_reduce_max(time.perf_counter() - start)
    return Block(num_steps, totals.examples, sec, strategy.num_tracings - tracings)


def time_all_reduce(strategy: "Strategy") -> list[AllReduceTime]:
    """Times all-reduces of the model's gradients, scaled to several sizes.

    The last one has the gradients' own size; only this one uses buckets, because other sizes would
    have another number of buckets.
    """
    import tensorflow as tf

    weights = [tf.TensorSpec(w.shape, w.dtype) for w in strategy.model.trainable_variables]
    gradient_buckets = strategy.gradient_buckets(weights)
    scales = [s for s in _SCALES if s * gradient_buckets.size_bytes <= _LARGEST_ALL_REDUCE_BYTES]
    if len(gradient_buckets.buckets) < len(weights):
        scales = []
    return [_time_all_reduce_of(strategy, weights, scale) for scale in (*scales, 1.0)]


def _time_all_reduce_of(
    strategy: "Strategy", weights: "list[tf.TensorSpec]", scale: float
) -> AllReduceTime:
    import tensorflow as tf

    tensors = []
    for device in strategy.local_replica_devices:
        with tf.device(device):
            shapes = [w.shape if scale == 1 else _scaled(w, scale) for w in weights]
            tensors.append(
                [tf.zeros(shape, w.dtype) for shape, w in zip(shapes, weights, strict=True)]
            )
    size_bytes = strategy.gradient_buckets(tensors[0]).size_bytes
    num_times = 1

    @tf.function
    def repeat_all_reduce(tensors: list[list[tf.Tensor]], num_times: tf.Tensor) -> list:
        for _ in tf.range(num_times):
            tensors = strategy.all_reduce(tensors)
        return tensors

    secs: list[float] = []
    repeat_all_reduce(tensors, tf.constant(num_times))  # Compiles it.
    while len(secs) < _ALL_REDUCE_REPEATS:
        start = time.perf_counter()
        for tensor in repeat_all_reduce(tensors, tf.constant(num_times))[-1]:
            tensor.numpy()
        sec = strategy.workers.all_reduce_max(time.perf_counter() - start)[0]
        if sec < _ALL_REDUCE_SEC and not secs:
            num_times *= 2
        else:
            secs.append(sec / num_times)
    return AllReduceTime(strategy.num_replicas, size_bytes, statistics.median(secs))


def _scaled(weight: "tf.TensorSpec", scale: float) -> list[int]:
    return [max(1, round(weight.shape.num_elements() * scale))]


def _facts(
    spec: "TrainingSpec", strategy: "Strategy", prepared: device_setup.Devices, compile_sec: float
) -> Facts:
    import tensorflow as tf

    from app.runtime.versions import versions
    from strategies.flops import product_layers, training_flops_per_example

    weights = [tf.TensorSpec(w.shape, w.dtype) for w in strategy.model.trainable_variables]
    return Facts(
        devices=strategy.devices,
        num_replicas=strategy.num_replicas,
        simulated_devices=prepared.simulated,
        cores=device_setup.num_cores(),
        intra_op_threads=prepared.intra_op_threads,
        dataset=spec.dataset.name,
        global_batch_size=spec.config.global_batch_size,
        compute_dtype=next(product_layers(strategy.model)).compute_dtype,
        jit_compile=strategy.jit_compile,
        all_reduce=strategy.algorithm,
        tensor_float_32="GPU" in strategy.devices[0]
        and tf.config.experimental.tensor_float_32_execution_enabled(),
        gradient_bytes=strategy.gradient_buckets(weights).size_bytes,
        flops_per_example=training_flops_per_example(strategy.model),
        compile_sec=compile_sec,
        versions=versions(),
    )
