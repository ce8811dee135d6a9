"""Implements pipeline parallelism (network partitioning). Read this file from top to bottom.

The layers of the network are cut into K consecutive stages, one per device. A stage sends its
activations to the next device and receives the gradient with respect to them. The global batch is
split into M micro-batches so that the devices work in parallel: while stage 1 works on the first
micro-batch, stage 0 works on the second. A schedule defines the order (`schedules.py`). One
training step

1. splits the batch,
2. runs the schedule, in which each backward pass is the chain rule through one stage, and
3. adds the gradients of the micro-batches in order, and updates each stage's weights on its device.

All micro-batches of a step use the same weights.

With `--model_parallel=K` on R·K devices there are R pipelines, each with its own part of the batch;
before the update, the gradients of each stage are summed over the pipelines (an all-reduce).

Not implemented: interleaved stages, several per device, reduce idle time at the cost of more
messages (D. Narayanan et al., 2021). Zero-bubble schedules split the backward pass into gradients
by inputs and gradients by weights, and fill idle time with the latter (P. Qi et al., 2023).
PipeDream (2019) does not wait for the last micro-batch and trains with stale weights.

Reference: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", 2019.
"""

import functools
from collections.abc import Sequence
from typing import Any

import keras
import tensorflow as tf

from strategies import base
from strategies.copies import Variables
from strategies.cuts import cut
from strategies.layer_calls import LayerCalls
from strategies.loss_scale import share_overflow
from strategies.manual import all_reduce
from strategies.model_parallel import Classify, ModelParallelStrategy
from strategies.observer import Shard
from strategies.schedules import SCHEDULES, Task, in_order
from strategies.stages import Pipeline, Stage


class PipelineStrategy(ModelParallelStrategy):
    """Trains stages of consecutive layers on consecutive devices, with micro-batches."""

    name = "pipeline"

    def __init__(
        self,
        devices: Sequence[str],
        *,
        micro_batches: int = 4,
        schedule: str = "1f1b",
        recompute: bool = False,
        pipeline_cuts: Sequence[str] = (),
        **options: Any,
    ):
        super().__init__(devices, accumulate_steps=micro_batches, **options)
        self.tasks = in_order(SCHEDULES[schedule], self.devices_per_replica, micro_batches)
        self._recomputes, self._cuts = recompute, pipeline_cuts

    def build_parts(
        self, model_calls: LayerCalls, optimizer_fn: base.OptimizerFn
    ) -> keras.optimizers.Optimizer:
        stages = cut(model_calls, self.devices_per_replica, self._cuts)
        self.pipelines = []
        for devices in self.replica_devices:
            own = [
                Stage.create(calls, device, optimizer_fn, self.shards_per_replica)
                for calls, device in zip(stages, devices, strict=True)
            ]
            self.pipelines.append(Pipeline(self.model, own))
        return self.pipelines[0].stages[0].optimizer

    def train_step(self, iterator: base.BatchIterator) -> base.StepTotals:
        images, labels = next(iterator)
        per_replica_sums, per_replica_totals = [], []
        for r, pipeline in enumerate(self.pipelines):
            bounds = [self.shard_bounds(tf.size(labels), i) for i in self.shard_ids(r)]
            micro_batches = pipeline.micro_batches(images, labels, bounds)  # 1. Split the batch.
            sums, totals = self._forward_and_backward(r, pipeline, micro_batches)
            per_replica_sums.append(sums)
            per_replica_totals.append(totals)
        for k in range(self.devices_per_replica):  # 3. Each stage: the sums,
            devices = [pipeline.devices[k] for pipeline in self.pipelines]
            sums_of_stage = [sums[k] for sums in per_replica_sums]
            for r, sums in enumerate(all_reduce(sums_of_stage, devices)):
                per_replica_sums[r][k] = sums
        for r, pipeline in enumerate(self.pipelines):
            applied = per_replica_sums[r]
            if self.loss_scale is not None:
                applied = share_overflow(applied, pipeline.devices)
            for stage, sums in zip(pipeline.stages, applied, strict=True):
                with tf.device(stage.device):  # and the update of its own weights.
                    stage.optimizer.apply(sums, stage.weights)
            self.observer.on_update(r, pipeline.to_model_order(per_replica_sums[r]))
        return base.StepTotals.sum(per_replica_totals)

    def _forward_and_backward(
        self, r: int, pipeline: Pipeline, micro_batches: Sequence[Shard]
    ) -> tuple[list[list[tf.Tensor]], base.StepTotals]:
        """Runs the forward and backward passes of all micro-batches in the order of the schedule.

        Returns:
            The summed gradients of each stage, and the totals over all micro-batches.
        """
        stages, last = pipeline.stages, len(pipeline.stages) - 1
        weights = pipeline.read_weights(self.observer, r * len(stages))
        inbox = {Task(0, True, m): [batch.images] for m, batch in enumerate(micro_batches)}
        passes, before, gradients, logits, losses, totals = {}, {}, {}, {}, {}, {}
        done: list[list[tf.Operation]] = [[] for _ in stages]
        for task in self.tasks:  # 2. The schedule.
            k, is_forward, m = task
            # Control dependencies enforce the order; otherwise a device runs any op that is ready.
            with tf.device(stages[k].device), tf.control_dependencies(done[k]):
                taken = self.observer.on_task(r, task, inbox.pop(task), ends=False)
                if is_forward:
                    (x,) = taken
                    statistics = [variable.value for variable in stages[k].statistics[m]]
                    if self._recomputes:  # Save moving statistics and random states for later.
                        before[k, m] = [tf.identity(value) for value in statistics]
                    tape, y = _forward(stages[k], weights[k], x, statistics)
                    passes[k, m] = tape, x, y
                    made, receiver = [y], Task(k + 1, True, m)
                    if k == last:  # The backward pass starts from the gradient by the logits.
                        logits[m] = y
                        losses[m], totals[m], dy = self.loss_and_logits_gradient(
                            y, micro_batches[m].labels, micro_batches[m].num_global_examples
                        )
                        made, receiver = [dy], Task(k, False, m)
                    elif self._recomputes:  # Keep only the input.
                        del passes[k, m]
                        inbox[Task(k, False, m)] = [x]
                else:
                    *again, dy = taken
                    if again:
                        tape, y = _forward(stages[k], weights[k], again[0], before[k, m])
                        passes[k, m] = tape, again[0], y
                    tape, x, y = passes.pop((k, m))
                    sources = [x, *weights[k]] if k else weights[k]  # The chain rule.
                    made = tape.gradient(y, sources, output_gradients=dy)
                    receiver = Task(k - 1, False, m)
                made = self.observer.on_task(r, task, made, ends=True)
                if not is_forward:
                    gradients[k, m] = self.unscale(made[1:] if k else made)
                with tf.control_dependencies(made):
                    done[k] = [tf.no_op()]
            if receiver.stage >= 0:  # Send activations forward, or their gradients backward.
                with tf.device(stages[receiver.stage].device):
                    inbox.setdefault(receiver, []).append(tf.identity(made[0]))
        seen = [batch._replace(logits=logits[m]) for m, batch in enumerate(micro_batches)]
        sums = self._sums(r, pipeline, seen, losses, gradients)
        return sums, base.StepTotals.sum([totals[m] for m in range(len(micro_batches))])

    def _sums(
        self,
        r: int,
        pipeline: Pipeline,
        micro_batches: Sequence[Shard],
        losses: dict[int, tf.Tensor],
        gradients: dict[tuple[int, int], list[tf.Tensor]],
    ) -> list[list[tf.Tensor]]:
        """Adds the gradients `[k, m]` of each stage k over the micro-batches m."""
        sums: list[list[tf.Tensor]] = [[] for _ in pipeline.stages]
        for m, shard_id in enumerate(self.shard_ids(r)):
            per_stage = [gradients[k, m] for k in range(len(sums))]
            with tf.device(pipeline.devices[-1]):
                seen = self.observer.on_shard(
                    shard_id, micro_batches[m], losses[m], pipeline.to_model_order(per_stage)
                )
            for k, of_stage in enumerate(pipeline.to_stages(seen)):
                with tf.device(pipeline.devices[k]):  # In the order of the micro-batches.
                    pairs = zip(sums[k], of_stage, strict=True)
                    sums[k] = [a + b for a, b in pairs] if m else of_stage
        return sums

    def classifiers(self, statistics: base.Statistics) -> list[Classify]:
        return [functools.partial(p.classify, statistics=statistics) for p in self.pipelines]

    def copies(self) -> list[Variables]:
        return [pipeline.variables(self.variable_names) for pipeline in self.pipelines]

    def shard_variables(self) -> list[Variables]:
        return [p.statistics(m) for p in self.pipelines for m in range(self.shards_per_replica)]


def _forward(
    stage: Stage,
    weights: Sequence[tf.Tensor],
    x: tf.Tensor,
    statistics: Sequence[tf.Tensor | tf.Variable],
) -> tuple[tf.GradientTape, tf.Tensor]:
    """Returns a stage's output for a micro-batch, and the tape for its backward pass."""
    with tf.GradientTape() as tape:
        tape.watch([x, *weights] if x.dtype.is_floating else weights)
        return tape, stage.forward(x, weights, statistics, training=True)
