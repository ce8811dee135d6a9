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

from collections.abc import Sequence

import tensorflow as tf

from strategies.base import BatchIterator, OptimizerFn
from strategies.collectives import PerReplicaTensors
from strategies.cuts import cut
from strategies.evaluation import Statistics
from strategies.layer_calls import LayerCalls, variables_of
from strategies.model_parallel import ModelParallelStrategy
from strategies.observer import Shard
from strategies.parts import DevicePart
from strategies.schedules import SCHEDULES, Task, in_order
from strategies.stages import Passes, Stage, split_micro_batches
from strategies.step_totals import StepTotals


class PipelineStrategy(ModelParallelStrategy):
    """Trains stages of consecutive layers on consecutive devices, with micro-batches."""

    name = "pipeline"

    def prepare(self) -> None:
        super().prepare()
        schedule = SCHEDULES[self.options.schedule]
        self.tasks = in_order(schedule, self.devices_per_replica, self.options.micro_batches)

    def split_layers(self, model_calls: LayerCalls) -> None:
        self._cuts = cut(model_calls, self.devices_per_replica, self.options.pipeline_cuts)

    def build_parts(self, devices: Sequence[str], optimizer_fn: OptimizerFn) -> list[DevicePart]:
        num = self.shards_per_replica
        return [
            DevicePart.create(device, optimizer_fn, *variables_of(calls), num_shards=num)
            for device, calls in zip(devices, self._cuts, strict=True)
        ]

    def stages(self, r: int) -> list[Stage]:
        """Returns the stages of pipeline r, in the order of the network."""
        return [Stage(calls, part) for calls, part in zip(self._cuts, self.parts[r], strict=True)]

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        images, labels = next(iterator)
        per_replica_gradients, totals = [], []
        for r in range(self.num_replicas):
            bounds = [self.shard_bounds(tf.size(labels), i) for i in self.shard_ids(r)]
            devices = self.replica_devices[r]
            micro_batches = split_micro_batches(images, labels, bounds, devices)  # 1. Split.
            passes = self._run_schedule(r, micro_batches)  # 2. The schedule.
            per_replica_gradients.append(self._sum_of_micro_batches(r, passes))  # 3. Sum.
            totals.append(StepTotals.sum(list(passes.totals.values())))
        self.update(per_replica_gradients)  # 3. Update.
        return StepTotals.sum(totals)

    def _run_schedule(self, r: int, micro_batches: Sequence[Shard]) -> Passes:
        """Runs the passes of all micro-batches in the order of the schedule."""
        devices, last = self.replica_devices[r], self.devices_per_replica - 1
        passes = Passes(self.stages(r), self.read_weights(r), self.options.recompute)
        received = {Task(0, True, m): batch.images for m, batch in enumerate(micro_batches)}
        done: list[list[tf.Operation]] = [[] for _ in devices]
        for task in self.tasks:
            k, is_forward, m = task
            # Control dependencies enforce the order; otherwise a device runs any op that is ready.
            with tf.device(devices[k]), tf.control_dependencies(done[k]):
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
                with tf.device(devices[receiver.stage]):
                    received[receiver] = tf.identity(sent)
        return passes

    def _sum_of_micro_batches(self, r: int, passes: Passes) -> PerReplicaTensors:
        """Adds the gradients of each stage over the micro-batches, in order."""
        devices = self.replica_devices[r]
        sums: PerReplicaTensors = []
        for m, shard_id in enumerate(self.shard_ids(r)):
            per_stage = [passes.gradients[k, m] for k in range(len(devices))]
            with tf.device(devices[-1]):
                seen = self.observer.on_shard(
                    shard_id, passes.shards[m], passes.losses[m], self.join(r, per_stage)
                )
            gradients = self.split(r, seen)
            for k, device in enumerate(devices):
                with tf.device(device):
                    if m == 0:
                        sums.append(gradients[k])
                    else:
                        sums[k] = [a + b for a, b in zip(sums[k], gradients[k], strict=True)]
        return sums

    def join(self, r: int, per_part_tensors: PerReplicaTensors) -> list[tf.Tensor]:
        named: dict[str, tf.Tensor] = {}
        for part, tensors in zip(self.parts[r], per_part_tensors, strict=True):
            named.update(zip(part.weights, tensors, strict=True))
        return [named[path] for path in self.weight_paths]

    def split(self, r: int, wholes: Sequence[tf.Tensor]) -> PerReplicaTensors:
        named = dict(zip(self.weight_paths, wholes, strict=True))
        return [[named[path] for path in part.weights] for part in self.parts[r]]

    def logits(self, r: int, statistics: Statistics, images: tf.Tensor) -> tf.Tensor:
        x = images
        for stage in self.stages(r):
            weights = {path: weight.value for path, weight in stage.part.weights.items()}
            own = {path: variable.value for path, variable in stage.part.statistics[0].items()}
            with tf.device(stage.part.device):
                x = stage.forward(x, weights, own | statistics, training=False)
        return x
