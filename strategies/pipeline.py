"""Pipeline parallelism (network partitioning), to be read from top to bottom.

The layers of the network are cut into K consecutive stages, one for each device. A stage hands its
activations to the next device, and gets back the gradient by them. So that the devices work at the
same time, the global batch is split into M micro-batches: while stage 1 works on the first one,
stage 0 works on the second. A schedule, see `schedules.py`, says in which order. One training step
1. splits the batch, 2. works through the schedule, where each backward pass is the chain rule
through one stage, and 3. adds the gradients of the micro-batches, in order, and updates each
stage's weights on its own device. All micro-batches of a step see the same weights.

With `--model_parallel=K` on R·K devices there are R such pipelines, each with its own part of the
batch; before the update the gradients of each stage are summed over them (an all-reduce).

Left out on purpose: interleaved stages, several on each device, shorten idle time by more messages
(D. Narayanan et al., 2021). Zero-bubble schedules split the backward pass into that by inputs and
that by weights, so that the latter fills the gaps (P. Qi et al., 2023). PipeDream (2019) never waits
for the last micro-batch, and trains with weights that are one or more updates old.

Reference: Y. Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism", 2019.
"""

from collections.abc import Sequence
from operator import itemgetter
from typing import Any

import tensorflow as tf

from strategies import base, collectives
from strategies.copies import Variables, optimizer_names, optimizer_shapes
from strategies.layer_calls import LayerCalls
from strategies.manual import all_reduce, split_batch
from strategies.observer import Shard
from strategies.prediction import call_without_empty_batch
from strategies.schedules import SCHEDULES, in_order
from strategies.split_variable import RepeatedVariable
from strategies.stages import Stage, cut
from strategies.tf_private import free_values


class PipelineStrategy(base.Strategy):
    """Consecutive layers on consecutive devices, and micro-batches that go through them."""

    name = "pipeline"

    def __init__(
        self,
        devices: Sequence[str],
        *,
        model_parallel: int | None = None,
        micro_batches: int = 4,
        schedule: str = "1f1b",
        recompute: bool = False,
        pipeline_cuts: Sequence[str] = (),
        **options: Any,
    ):
        num_stages = model_parallel or len(devices)
        super().__init__(
            devices, model_parallel=num_stages, accumulate_steps=micro_batches, **options
        )
        self.tasks = in_order(SCHEDULES[schedule], num_stages, micro_batches)
        self._recomputes, self._cuts = recompute, pipeline_cuts

    def build(self, model_fn: base.ModelFn, optimizer_fn: base.OptimizerFn) -> None:
        self.model = model_fn()
        self._optimizer_names = list(optimizer_shapes(self.model, optimizer_fn))
        stages = cut(LayerCalls.of(self.model), self.devices_per_replica, self._cuts)
        devices = iter(self.devices)
        self.pipelines = [  # Item [r][k] is stage k of replica r.
            [
                Stage.create(calls, next(devices), optimizer_fn(), self.shards_per_replica)
                for calls in stages
            ]
            for _ in range(self.num_replicas)
        ]
        self.optimizer = self.pipelines[0][0].optimizer
        paths = [path for stage in self.pipelines[0] for path in stage.weight_paths]
        self._model_order = [paths.index(v.path) for v in self.model.trainable_variables]
        free_values(self.model.variables)  # Stages have their own.

    def train_step(self, iterator: base.BatchIterator) -> base.StepTotals:
        images, labels = next(iterator)
        per_replica_sums, per_replica_totals = [], []
        for r in range(self.num_replicas):
            sums, totals = self._gradients_of_pipeline(r, images, labels)
            per_replica_sums.append(sums)
            per_replica_totals += totals
        for k, column in enumerate(zip(*self.pipelines, strict=True)):
            per_replica_sums_of_stage = all_reduce(
                [sums[k] for sums in per_replica_sums], [stage.device for stage in column]
            )
            for r, stage in enumerate(column):
                with tf.device(stage.device):
                    stage.optimizer.apply(per_replica_sums_of_stage[r], stage.weights)
                per_replica_sums[r][k] = per_replica_sums_of_stage[r]
        for r, sums in enumerate(per_replica_sums):
            self.observer.on_update(r, self._to_model_order(sums))
        return base.StepTotals.sum(per_replica_totals)

    def _gradients_of_pipeline(
        self, r: int, images: tf.Tensor, labels: tf.Tensor
    ) -> tuple[list[list[tf.Tensor]], list[base.StepTotals]]:
        """Sends the micro-batches of replica r through its stages, forwards and backwards.

        Returns:
            For each stage its gradients, summed over the micro-batches, and the totals of each
            micro-batch.
        """
        stages, last = self.pipelines[r], len(self.pipelines[r]) - 1
        micro_batches = self._micro_batches(r, images, labels)  # 1. Split the batch.
        weights = self._weights(r)
        x = {(0, m): batch.images for m, batch in enumerate(micro_batches)}  # Inputs of stages.
        dy = {}  # Gradients by their outputs.
        passes, gradients, losses, totals = {}, {}, {}, {}
        done = [[] for _ in stages]
        for k, is_forward, m in self.tasks:  # 2. The schedule.
            stage = stages[k]
            # In this order: left to itself, a device starts whatever has its inputs.
            with tf.device(stage.device), tf.control_dependencies(done[k]):
                if is_forward:
                    tape, y = self._forward(stage, weights[k], x[k, m], m)
                    made = [y]
                    if k == last:
                        losses[m], totals[m], dy[k, m] = self.loss_and_logits_gradient(
                            y, micro_batches[m].labels, micro_batches[m].num_global_examples
                        )
                        made = [dy[k, m]]
                    if k == last or not self._recomputes:
                        passes[k, m] = tape, y
                else:
                    if (k, m) not in passes:  # Compute the activations again, from the input.
                        passes[k, m] = self._forward(stage, weights[k], x[k, m], m, again=True)
                    tape, y = passes.pop((k, m))
                    sources = [*([x[k, m]] if k else []), *weights[k]]
                    made = tape.gradient(y, sources, output_gradients=dy.pop((k, m)))
                    gradients[k, m] = self.unscale(made[1:] if k else made)
                with tf.control_dependencies(made):
                    done[k] = [tf.no_op()]
            if is_forward and k < last:  # Activations go on to the next device,
                with tf.device(stages[k + 1].device):
                    x[k + 1, m] = tf.identity(y)
            if not is_forward and k > 0:  # and the gradients by them back to the one before.
                with tf.device(stages[k - 1].device):
                    dy[k - 1, m] = tf.identity(made[0])
        self._observe(r, micro_batches, losses, gradients)
        sums = []
        for k, stage in enumerate(stages):  # 3. Added in the order of the micro-batches.
            of_stage = zip(*(gradients[k, m] for m in range(len(micro_batches))), strict=True)
            with tf.device(stage.device):
                sums.append([collectives.add_in_order(g) for g in of_stage])
        return sums, [totals[m] for m in range(len(micro_batches))]

    def _forward(
        self, stage: Stage, weights: list[tf.Tensor], x: tf.Tensor, m: int, *, again: bool = False
    ) -> tuple[tf.GradientTape, tf.Tensor]:
        """Returns a stage's output for micro-batch m, and the tape for its backward pass."""
        statistics = [variable.value for variable in stage.statistics[m]]
        if again:  # They have been updated.
            statistics = [tf.identity(value) for value in statistics]
        with tf.GradientTape() as tape:
            tape.watch([*weights, *([x] if x.dtype.is_floating else [])])
            return tape, stage.forward(x, weights, statistics, training=True)

    def _micro_batches(self, r: int, images: tf.Tensor, labels: tf.Tensor) -> list[Shard]:
        """Returns the micro-batches of replica r: images on its first device, labels on its last."""
        stages, micro_batches = self.pipelines[r], []
        for shard_id in range(r * self.shards_per_replica, (r + 1) * self.shards_per_replica):
            start, end = self.shard_bounds(tf.size(labels), shard_id)
            with tf.device(stages[0].device):
                own_images = tf.identity(images[start:end])
            with tf.device(stages[-1].device):
                micro_batches.append(Shard(own_images, labels[start:end], tf.size(labels)))
        return micro_batches

    def _weights(self, r: int) -> list[list[tf.Tensor]]:
        """Reads the weights of each stage once, so that all micro-batches see the same."""
        weights = []
        for k, stage in enumerate(self.pipelines[r]):
            with tf.device(stage.device):
                read = [tf.identity(variable.value) for variable in stage.weights]
                named = dict(zip(stage.weight_paths, read, strict=True))
                device_id = r * self.devices_per_replica + k
                weights.append(list(self.observer.on_weights(device_id, named).values()))
        return weights

    def _observe(
        self, r: int, micro_batches: list[Shard], losses: dict, gradients: dict
    ) -> None:
        """Shows each micro-batch to the observer, and takes the gradients that it returns."""
        for m, batch in enumerate(micro_batches):
            per_stage = [gradients[k, m] for k in range(self.devices_per_replica)]
            shard_id = r * self.shards_per_replica + m
            with tf.device(self.pipelines[r][-1].device):
                seen = self.observer.on_shard(
                    shard_id, batch, losses[m], self._to_model_order(per_stage)
                )
            for k, of_stage in enumerate(self._to_stages(seen)):
                gradients[k, m] = of_stage

    def _to_model_order(self, per_stage: list[list[tf.Tensor]]) -> list[tf.Tensor]:
        """Returns the tensors of all stages in the order of the model's weights."""
        flat = [tensor for tensors in per_stage for tensor in tensors]
        return [flat[i] for i in self._model_order]

    def _to_stages(self, tensors: list[tf.Tensor]) -> list[list[tf.Tensor]]:
        """The opposite of `_to_model_order`."""
        flat = iter(t for _, t in sorted(zip(self._model_order, tensors, strict=True), key=itemgetter(0)))
        return [[next(flat) for _ in stage.weights] for stage in self.pipelines[0]]

    def forward(
        self, iterator: base.BatchIterator, statistics: base.Statistics
    ) -> list[base.LogitsAndTotals]:
        images, labels = next(iterator)
        firsts, results = self.devices[:: self.devices_per_replica], []
        parts = split_batch((images, labels), firsts, self.replica_weights)
        for stages, (own_images, own_labels) in zip(self.pipelines, parts, strict=True):

            def logits(x: tf.Tensor, stages: list[Stage] = stages) -> tf.Tensor:
                for stage in stages:
                    with tf.device(stage.device):
                        weights = [variable.value for variable in stage.weights]
                        own = [
                            statistics.get(path, variable.value)
                            for path, variable in zip(
                                stage.statistics_paths, stage.statistics[0], strict=True
                            )
                        ]
                        x = stage.forward(x, weights, own, training=False)
                return x

            with tf.device(stages[0].device):
                own_logits = call_without_empty_batch(logits, own_images)
                _, totals = self.loss(own_logits, own_labels, tf.size(labels))
            results.append((own_logits, totals))
        return results

    def copies(self) -> list[Variables]:
        copies = []
        for stages in self.pipelines:
            model, optimizer = {}, {name: [] for name in self._optimizer_names}
            for stage in stages:
                model |= zip(stage.weight_paths, stage.weights, strict=True)
                model |= zip(stage.statistics_paths, stage.statistics[0], strict=True)
                names = optimizer_names(stage.optimizer)
                for name, variable in zip(names, stage.optimizer.variables, strict=True):
                    optimizer[name].append(variable.value)
            whole = {f"model/{v.path}": model[v.path].value for v in self.model.variables}
            for name, variables in optimizer.items():  # Each stage counts the steps.
                whole[name] = variables[0] if len(variables) == 1 else RepeatedVariable(variables)
            copies.append(whole)
        return copies

    def shard_statistics(self) -> list[Variables]:
        per_shard = []
        for stages in self.pipelines:
            for m in range(self.shards_per_replica):
                own = {
                    f"model/{path}": variable.value
                    for stage in stages
                    for path, variable in zip(
                        stage.statistics_paths, stage.statistics[m], strict=True
                    )
                }
                per_shard.append({name: own[name] for name in self.statistics_names})
        return per_shard

    @property
    def variable_names(self) -> list[str]:
        return [f"model/{v.path}" for v in self.model.variables] + self._optimizer_names
