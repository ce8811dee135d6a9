"""Implements pipeline parallelism (network partitioning). Read this file from top to bottom.

The layers of the network are cut into K consecutive stages, one per device. A stage sends its
activations to the next device and receives the gradient with respect to them. The global batch is
split into M micro-batches so that the devices work in parallel: while stage 1 works on the first
micro-batch, stage 0 works on the second. A schedule defines the order (`schedules.py`). One
training step

1. splits the batch,
2. runs the schedule, in which each backward pass is the chain rule through one stage, and
3. adds the gradients of the micro-batches in order, and updates each stage's weights on its device.

All micro-batches of a step use the same weights. With `--model_parallel=K` on R·K devices there are
R pipelines, each with its own part of the batch; before the update, the gradients of each stage are
summed over the pipelines (an all-reduce). `cuts.py` chooses the cuts, `stages.py` has the stages.

Not implemented: interleaved stages, several per device, reduce idle time at the cost of more
messages (D. Narayanan et al., 2021). Zero-bubble schedules split the backward pass into gradients
by inputs and gradients by weights, and fill idle time with the latter (P. Qi et al., 2023).
PipeDream (2019) does not wait for the last micro-batch and trains with stale weights.

Reference: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", 2019.
"""

import functools
from collections.abc import Sequence

import keras
import tensorflow as tf

from strategies.base import BatchIterator, OptimizerFn
from strategies.copies import Variables
from strategies.cuts import cut
from strategies.evaluation import Statistics
from strategies.layer_calls import LayerCalls
from strategies.model_parallel import Classify, ModelParallelStrategy
from strategies.observer import Shard
from strategies.schedules import SCHEDULES, Task, in_order
from strategies.stages import Passes, Pipeline, Stage
from strategies.step_totals import StepTotals


class PipelineStrategy(ModelParallelStrategy):
    """Trains stages of consecutive layers on consecutive devices, with micro-batches."""

    name = "pipeline"

    def count_shards_per_replica(self) -> int:
        return self.options.micro_batches

    def prepare(self) -> None:
        super().prepare()
        schedule = SCHEDULES[self.options.schedule]
        self.tasks = in_order(schedule, self.devices_per_replica, self.options.micro_batches)

    def build_parts(
        self, model_calls: LayerCalls, optimizer_fn: OptimizerFn
    ) -> keras.optimizers.Optimizer:
        stages = cut(model_calls, self.devices_per_replica, self.options.pipeline_cuts)
        self.pipelines = []
        for devices in self.replica_devices:
            own = [
                Stage.create(calls, device, optimizer_fn, self.shards_per_replica)
                for calls, device in zip(stages, devices, strict=True)
            ]
            self.pipelines.append(Pipeline(self.model, own))
        return self.pipelines[0].stages[0].optimizer

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        images, labels = next(iterator)
        per_replica_gradients, totals = [], []
        for r, pipeline in enumerate(self.pipelines):
            bounds = [self.shard_bounds(tf.size(labels), i) for i in self.shard_ids(r)]
            micro_batches = pipeline.micro_batches(images, labels, bounds)  # 1. Split the batch.
            passes = self._run_schedule(r, micro_batches)  # 2. The schedule.
            per_replica_gradients.append(self._sum_of_micro_batches(r, passes))  # 3. The sums,
            totals.append(StepTotals.sum(list(passes.totals.values())))
        per_replica_sums = self.sum_over_replicas(per_replica_gradients)
        for r, (pipeline, sums) in enumerate(zip(self.pipelines, per_replica_sums, strict=True)):
            pipeline.update(sums)  # and the updates.
            self.observer.on_update(r, pipeline.to_model_order(sums))
        return StepTotals.sum(totals)

    def _run_schedule(self, r: int, micro_batches: Sequence[Shard]) -> Passes:
        """Runs the passes of all micro-batches in the order of the schedule."""
        pipeline, last = self.pipelines[r], self.devices_per_replica - 1
        passes = Passes(pipeline.stages, self.read_weights(r), self.options.recompute)
        received = {Task(0, True, m): batch.images for m, batch in enumerate(micro_batches)}
        done: list[list[tf.Operation]] = [[] for _ in pipeline.stages]
        for task in self.tasks:
            k, is_forward, m = task
            # Control dependencies enforce the order; otherwise a device runs any op that is ready.
            with tf.device(pipeline.devices[k]), tf.control_dependencies(done[k]):
                if not is_forward:
                    sent, results = passes.backward(k, m, received.pop(task), self.loss_scale)
                    receiver = Task(k - 1, False, m)
                elif k < last:
                    sent = passes.forward(k, m, received.pop(task))
                    results, receiver = [sent], Task(k + 1, True, m)
                else:  # The backward pass starts from the gradient by the logits.
                    batch = micro_batches[m]
                    logits = passes.forward(k, m, received.pop(task))
                    passes.losses[m], passes.totals[m], sent = self.loss_and_logits_gradient(
                        logits, batch.labels, batch.num_global_examples
                    )
                    passes.shards[m] = batch._replace(logits=logits)
                    results, receiver = [sent], Task(k, False, m)
                with tf.control_dependencies(results):
                    done[k] = [tf.no_op()]
            if receiver.stage >= 0:  # Send activations forward, or their gradients backward.
                with tf.device(pipeline.devices[receiver.stage]):
                    received[receiver] = tf.identity(sent)
        return passes

    def _sum_of_micro_batches(self, r: int, passes: Passes) -> list[list[tf.Tensor]]:
        """Adds the gradients of each stage over the micro-batches, in order."""
        pipeline = self.pipelines[r]
        sums: list[list[tf.Tensor]] = []
        for m, shard_id in enumerate(self.shard_ids(r)):
            per_stage = [passes.gradients[k, m] for k in range(self.devices_per_replica)]
            with tf.device(pipeline.devices[-1]):
                seen = self.observer.on_shard(
                    shard_id, passes.shards[m], passes.losses[m], pipeline.to_model_order(per_stage)
                )
            gradients = pipeline.to_stages(seen)
            for k, device in enumerate(pipeline.devices):
                with tf.device(device):
                    if m == 0:
                        sums.append(gradients[k])
                    else:
                        sums[k] = [a + b for a, b in zip(sums[k], gradients[k], strict=True)]
        return sums

    def read_weights(self, r: int) -> list[list[tf.Tensor]]:
        """Reads the weights of each stage of pipeline r."""
        return self.pipelines[r].read_weights()

    def classifiers(self, statistics: Statistics) -> list[Classify]:
        return [functools.partial(p.classify, statistics=statistics) for p in self.pipelines]

    @property
    def part_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        return [stage.weight_shapes for p in self.pipelines for stage in p.stages]

    def copies(self) -> list[Variables]:
        return [pipeline.variables(self.variable_names) for pipeline in self.pipelines]

    def shard_variables(self) -> list[Variables]:
        return [p.statistics(m) for p in self.pipelines for m in range(self.shards_per_replica)]
