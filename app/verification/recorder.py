"""Records the steps of a training with any strategy as a trace, and finds slow replicas."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np
import tensorflow as tf

from app.options.fault import MIN_STRAGGLER_STEPS
from app.runtime.errors import ConfigError
from app.runtime.versions import versions
from lockstep.data import trace as traces
from lockstep.data.trace import About, Trace, Variable
from strategies.base import Strategy
from strategies.observer import Observer, Shard

T = TypeVar("T")
# Seconds, and seconds of processor time, from the start of a step until a replica sent its
# gradients.
SendTime = tuple[float, float]

# The others wait longer than they worked, or a large part of that while the processor is idle.
# Logical devices share cores: with one more replica than cores, the last one is late by the work of
# one replica, but the cores are then busy.
_LONG_WAIT, _IDLE_WAIT, _IDLE = 1.25, 0.25, 0.25
_SHORTEST_WAIT_SEC = 0.01


class StepRecorder(Observer):
    """Observes the steps of a strategy, and adds the arrays of the last step to a trace.

    Args:
        strategy: a built strategy.
        inner: a second observer, which may inject a fault: what a shard computes is kept before it,
            the sums after it.
        communication_dtype: dtype of the gradient all-reduce; "" for that of the gradients.
    """

    def __init__(
        self, strategy: Strategy, inner: Observer | None = None, *, communication_dtype: str = ""
    ):
        self._strategy, self.inner = strategy, inner or Observer()
        self._communication_dtype = communication_dtype
        self._kept: dict[tuple[str, int], Any] = {}
        self._start = 0.0, 0.0
        self._syncs_batch_norm = strategy.syncs_batch_norm  # As configured, before any fault.

    def about(self, steps: Sequence[int]) -> About:
        """Returns the description of a trace of these steps, with numbers from 0."""
        strategy, size = self._strategy, self._strategy.shards_per_replica
        workers, model = strategy.workers, strategy.model
        num_local = strategy.num_replicas // workers.count
        first = workers.index * num_local
        optimizer = {"class": type(strategy.optimizer).__name__, "framework": "keras"}
        return About(
            "lockstep",
            strategy.num_replicas,
            steps=tuple(steps),
            replicas=tuple(range(first, first + num_local)) if workers.count > 1 else (),
            variables=tuple(_variables(strategy)),
            gradients=tuple(variable.path for variable in model.trainable_variables),
            shards=tuple(
                traces.Shard(shard_id // size, float(weight))
                for shard_id, weight in enumerate(strategy.shard_weights)
            ),
            num_copies=strategy.num_copies,
            syncs_batch_norm=self._syncs_batch_norm,
            reduction="sum",
            reduced_in=self._communication_dtype,
            optimizer=optimizer,
            data_layout="NHWC",
            structure={"tuple": [0, 1]},
            predicted=0,
            parts=tuple(strategy.part_shapes),
            versions=versions(),
        )

    def record_step(self, trace: Trace, position: int, train: Callable[[], T]) -> tuple[T, float]:
        """Calls a function that runs one step, and adds the step to a trace.

        Returns:
            The result of the function, and the seconds of the call.
        """
        self.put_state(trace, position, "before")
        self._start = time.monotonic(), time.process_time()
        result = train()
        call_sec = time.monotonic() - self._start[0]
        for shard_id, kept in self._take("shard").items():
            images, labels, logits, loss, *raw = kept
            trace.put(position, "data", shard_id, [images, labels])
            trace.put(position, "y_pred", shard_id, [logits])
            trace.put(position, "mask", shard_id, [np.zeros(())])
            trace.put(position, "loss", shard_id, [loss, np.zeros((), loss.dtype)])
            trace.put(position, "raw", shard_id, raw)
        for copy_id, sums in self._take("sums").items():
            trace.put(position, "sums", copy_id, sums)
        self.put_state(trace, position, "after")
        return result, call_sec

    def put_state(self, trace: Trace, position: int, when: str) -> None:
        """Adds the variables of this worker to a trace, "before" or "after" a step.

        Those of a copy have averaged moving statistics; several shards have their own.
        """
        strategy, averages = self._strategy, self._strategy.states.averaged_statistics()
        for copy_id, state in zip(strategy.local_copy_ids, strategy.states.per_copy(), strict=True):
            trace.put(position, when, copy_id, list((state | averages).values()))
        if averages and strategy.num_shards > 1:
            per_shard = zip(
                strategy.local_shard_ids, strategy.states.shard_statistics(), strict=True
            )
            for shard_id, own in per_shard:
                found = {name: variable.numpy() for name, variable in own.items()}
                arrays = [found.get(name) for name in strategy.states.variable_names]
                trace.put(position, f"own_{when}", shard_id, arrays)

    def take_times(self) -> list[SendTime]:
        """Returns when this worker's replicas sent their gradients in the last step."""
        (start, busy), num = self._start, self._strategy.shards_per_replica
        times = [(sec - start, cpu - busy) for sec, cpu in self._take("times").values()]
        return [max(times[i : i + num]) for i in range(0, len(times), num)]

    def on_shard(
        self, shard_id: int | tf.Tensor, shard: Shard, loss: tf.Tensor, gradients: list[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Keeps examples, logits, loss and gradients, and the time at which they were sent."""
        kept = [shard.images, shard.labels, shard.logits, loss, *gradients]
        self._keep("shard", shard_id, kept)
        sent = self.inner.on_shard(shard_id, shard, loss, gradients)
        with tf.control_dependencies(sent):
            tf.numpy_function(self._keep_time, [shard_id], [])
        return sent

    def on_update(self, copy_id: int | tf.Tensor, summed_gradients: list[tf.Tensor]) -> None:
        """Keeps the sums."""
        self._keep("sums", copy_id, summed_gradients)
        self.inner.on_update(copy_id, summed_gradients)

    def _keep(self, what: str, item_id: int | tf.Tensor, tensors: Sequence[tf.Tensor]) -> None:
        """Keeps tensors of a shard or a copy once they are computed."""

        def keep(item_id: np.ndarray, *arrays: np.ndarray) -> None:
            self._kept[what, int(item_id)] = [np.array(array) for array in arrays]

        # NumPy cannot save bfloat16.
        kept = [tf.cast(t, tf.float32) if t.dtype == tf.bfloat16 else t for t in tensors]
        tf.numpy_function(keep, [item_id, *kept], [])

    def _keep_time(self, shard_id: np.ndarray) -> None:
        self._kept["times", int(shard_id)] = time.monotonic(), time.process_time()

    def _take(self, what: str) -> dict[int, Any]:
        """Returns what was kept of this worker's shards, or copies, in the last step, in order."""
        strategy, of_copies = self._strategy, what == "sums"
        taken = {i: self._kept.pop((kind, i)) for kind, i in list(self._kept) if kind == what}
        ids = strategy.local_copy_ids if of_copies else strategy.local_shard_ids
        if set(taken) != set(ids):
            found = ", ".join(map(str, sorted(taken))) or "none"
            items = "copies" if of_copies else "shards"
            method = "apply_gradients" if of_copies else "local_gradients"
            raise ConfigError(
                f"strategy {strategy.name} reported the {what} of {items} {found} instead of"
                f" {', '.join(map(str, ids))}; its train_step must call self.{method} for each, see"
                " docs/extend.md"
            )
        return {item_id: taken[item_id] for item_id in ids}


def _variables(strategy: Strategy) -> list[Variable]:
    """Returns the description of all variables of a copy, in the order of `variable_names`."""
    weights = [variable.path for variable in strategy.model.trainable_variables]
    found = []
    for name in strategy.states.variable_names:
        path = name.removeprefix("model/")
        if name in strategy.states.statistics_names:
            found.append(Variable(path, traces.STATISTIC))
        elif name.startswith("model/"):
            found.append(Variable(path, traces.WEIGHT))
        else:  # For example optimizer/conv1_kernel_momentum.
            stem = path.removeprefix("optimizer/")
            of = [w for w in weights if stem.startswith(f"{w.replace('/', '_')}_")]
            weight = max(of, key=len, default="")
            slot = stem.removeprefix(f"{weight.replace('/', '_')}_") if weight else stem
            found.append(Variable(path, traces.STATE, of=weight, slot=slot))
    return found


def check_repeatable(model: keras.Model) -> None:
    """Checks that a step is a function of only weights and examples.

    Raises:
        ConfigError: a layer draws random numbers in training.
    """
    seeds = [v.path for v in model.variables if not np.issubdtype(np.dtype(v.dtype), np.floating)]
    if seeds:
        raise ConfigError(
            f"model {model.name} draws random numbers in training ({seeds[0]}), so a step"
            " cannot be repeated; leave out layers such as Dropout"
        )


def find_straggler(
    times: Sequence[list[SendTime]], replica_weights: Sequence[float] = ()
) -> tuple[int, str] | None:
    """Finds a replica that the others had to wait for in every step, by a wide margin.

    With unequal shards, it must be late both in its times and in its times per example: a larger
    shard takes longer, but not in proportion to its examples.

    Args:
        times: times for each step and replica. The first step is ignored because it compiles.
        replica_weights: relative sizes of the replicas' shards; empty for equal sizes.

    Returns:
        The id of the replica, and how late it is: medians over the steps.
    """
    steps = times[1:]
    if len(times) < MIN_STRAGGLER_STEPS or len(steps[0]) < 2:
        return None
    weights = replica_weights or [1] * len(steps[0])
    mean = sum(weights) / len(weights)
    scales = [1.0] * len(weights), [mean / weight for weight in weights]
    for replica_id in range(len(weights)):
        if all(_is_late(replica_id, step, scale) for step in steps for scale in scales):
            others = [max(step[:replica_id] + step[replica_id + 1 :])[0] for step in steps]
            waits = [s[replica_id][0] - o for s, o in zip(steps, others, strict=True)]
            return replica_id, (
                f"it sends its gradients {1000 * statistics.median(waits):.0f} ms after all others,"
                f" which took {1000 * statistics.median(others):.0f} ms, and they wait for it; the"
                " numbers are right"
            )
    return None


def _is_late(replica_id: int, step: Sequence[SendTime], scales: Sequence[float]) -> bool:
    """Returns whether the others wait for a replica in a step, with times multiplied by scales."""
    scaled = [(sec * scale, cpu * scale) for (sec, cpu), scale in zip(step, scales, strict=True)]
    sent, busy = scaled.pop(replica_id)
    work, busy_of_others = max(scaled)
    wait, is_idle = sent - work, busy - busy_of_others < _IDLE * (sent - work)
    is_long = wait > _LONG_WAIT * work or (wait > _IDLE_WAIT * work and is_idle)
    return is_long and wait >= _SHORTEST_WAIT_SEC
