"""Runs the process of a case: builds a training, warms up, and times blocks of steps on demand."""

import pathlib
import re
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from app.devices import device_setup
from app.performance.case import Block, Case, Facts
from app.performance.traffic import Traffic, count_traffic
from app.runtime import console
from app.runtime.processes import Channel

if TYPE_CHECKING:  # Not imported before its devices are set up.
    import tensorflow as tf

    from app.training.training_spec import TrainingSpec
    from strategies.base import Strategy

_WARM_UP_STEPS = 3
BLOCK_SEC = 2.0  # Long enough to average out the scheduler's time slices.


def sample(channel: Channel, case: Case) -> tuple[int, Traffic | None]:
    """Times blocks until it receives None.

    Sends `Facts`; then "ready" with the number of steps per block. Then, for each number of steps
    that it receives, sends a `Block`; for None, ends.

    Returns:
        Its peak memory in bytes, and its traffic if the case counts it.
    """
    start = time.monotonic()
    console.forward_warnings(lambda text: channel.send(("warning", text)))
    prepared = device_setup.set_up(case.config)

    from app.data.dataset_loader import load_data
    from app.training.all_reduce_self_test import run_all_reduce_self_test
    from app.training.training_spec import TrainingSpec

    spec = TrainingSpec(case.config, load_data(case.config))
    strategy = spec.build_strategy(prepared, all_reduce="none" if case.no_sync else None)
    run_all_reduce_self_test(strategy)
    batches = spec.batches() if case.reads_input else _repeat_one_batch(spec)
    iterator = strategy.distribute(batches)
    strategy.train_steps(iterator, 0)
    _reset_peak(strategy.local_devices)
    strategy.train_steps(iterator, 1)  # Only an actual step makes XLA compile.
    compile_sec = time.monotonic() - start
    channel.send(("facts", _facts(spec, strategy, prepared, compile_sec)))

    strategy.train_steps(iterator, _WARM_UP_STEPS)
    step_sec = _time_block(strategy, iterator, _WARM_UP_STEPS).step_sec
    num_steps = max(1, round(BLOCK_SEC / step_sec))
    channel.send(("ready", num_steps))
    while num_steps := channel.receive():
        channel.send(("block", _time_block(strategy, iterator, num_steps)))
    # Deleting an iterator of MirroredStrategy can take 30 s; it is kept until the process ends.
    channel.kept.append(iterator)
    peak = _peak_memory_bytes(strategy.local_devices)
    if not case.counts_traffic:
        return peak, None
    (batch,) = spec.batches().take(1)
    return peak, count_traffic(strategy, batch)


def _repeat_one_batch(spec: "TrainingSpec") -> "tf.data.Dataset":
    """Returns a dataset that repeats the first batch of a training, at no cost."""
    import tensorflow as tf

    options = tf.data.Options()
    options.autotune.enabled = False
    (batch,) = spec.batches().take(1)
    return tf.data.Dataset.from_tensors(batch).repeat().with_options(options)


def _time_block(strategy: "Strategy", iterator: Any, num_steps: int) -> Block:
    tracings = strategy.steps.num_tracings
    start = time.perf_counter()
    totals = strategy.train_steps(iterator, num_steps)  # Numbers: the last step is done.
    # Without an all-reduce, workers do not wait for each other; the slowest determines the time.
    (sec,) = strategy.workers.all_reduce_max(time.perf_counter() - start)
    return Block(num_steps, totals.examples, sec, strategy.steps.num_tracings - tracings)


def _facts(
    spec: "TrainingSpec", strategy: "Strategy", prepared: device_setup.Devices, compile_sec: float
) -> Facts:
    import tensorflow as tf

    from app.runtime.versions import versions

    return Facts(
        devices=strategy.devices,
        simulated_devices=prepared.simulated,
        cores=device_setup.num_cores(),
        intra_op_threads=prepared.intra_op_threads,
        dataset=spec.dataset.name,
        global_batch_size=spec.config.training.global_batch_size,
        jit_compile=strategy.options.jit_compile,
        all_reduce=strategy.algorithm,
        tensor_float_32="GPU" in strategy.devices[0]
        and tf.config.experimental.tensor_float_32_execution_enabled(),
        compile_sec=compile_sec,
        versions=versions(),
    )


def _reset_peak(devices: Sequence[str]) -> None:
    """Forgets the earlier peak of GPUs."""
    import tensorflow as tf

    for name in _gpus(devices):
        tf.config.experimental.reset_memory_stats(name)


def _peak_memory_bytes(devices: Sequence[str]) -> int:
    """Returns the peak memory of the GPUs among `devices`, else of this process."""
    import tensorflow as tf

    gpus = _gpus(devices)
    if gpus:
        return sum(tf.config.experimental.get_memory_info(name)["peak"] for name in gpus)
    # Not `resource.getrusage`: there, a new process starts with the value of its parent.
    text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
    (peak_kib,) = re.findall(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
    return int(peak_kib) * 1024


def _gpus(devices: Sequence[str]) -> list[str]:
    return [name.rpartition("/device:")[2] for name in devices if "GPU" in name]
