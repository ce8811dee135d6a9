"""Data parallelism by hand: the whole of it, to be read from top to bottom.

Every device holds a full copy of the model, a *replica*. One step of training is

1. split the global batch into a shard for each replica;
2. on each device, the gradient of the loss over its own shard;
3. an all-reduce: every device gets the sum of all the gradients;
4. on each device, the same update with the same gradient.

Because all replicas start from the same weights and all make the same update, their weights stay
equal, bit for bit, without being exchanged after the start. (What BatchNorm averages over time is
no weight: it follows each replica's own shards, and `base.py` averages it when it is needed.)

`base.py` compiles the step with `tf.function`. So the loops over the replicas below run once, while
the step is *traced*; what they leave behind is one graph, in which all devices work side by side.

In "Dive into Deep Learning", section "Training on Multiple GPUs", the same parts are called
`get_params` (here `build`), `split_batch`, `allreduce` and `train_batch` (here `train_step`).
"""

import functools
from typing import NamedTuple

import keras
import tensorflow as tf

from strategies.base import (
    BatchIterator,
    LogitsAndTotals,
    LossAndGradients,
    ModelFn,
    OptimizerFn,
    StepTotals,
    Strategy,
    classify,
)
from strategies.collectives import (
    PerReplicaTensors,
    all_reduce,
    broadcast,
    split_batch,
)
from strategies.loss import differentiate, shard_loss
from strategies.observer import Shard


class Replica(NamedTuple):
    """One full copy of the training, all of it on one device."""

    replica_id: int
    device: str
    model: keras.Model
    optimizer: keras.optimizers.Optimizer


class ManualStrategy(Strategy):
    """Replicas, gradient tapes and an all-reduce that one can read."""

    name = "manual"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        self.replicas = []
        for replica_id, device in enumerate(self.devices):
            with tf.device(device):
                replica = Replica(replica_id, device, model_fn(), optimizer_fn())
                replica.optimizer.build(replica.model.trainable_variables)
            self.replicas.append(replica)
        self.model, self.optimizer = self.replicas[0].model, self.replicas[0].optimizer

        # Training starts from one point: the weights of replica 0, on every device. Optimizers
        # hold nothing but zeros yet, so theirs are the same already.
        per_replica_weights = broadcast(self.model.variables, self.devices)
        for replica, weights in zip(self.replicas, per_replica_weights, strict=True):
            for variable, weight in zip(replica.model.variables, weights, strict=True):
                variable.assign(weight)

    def distribute(self, dataset: tf.data.Dataset) -> BatchIterator:
        return iter(dataset)  # Whole global batches: cutting them is part of the step.

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        # 1. A shard of the global batch for each replica.
        global_images, global_labels = next(iterator)
        shards = split_batch((global_images, global_labels), self.devices)

        # 2. On each device, the gradient of its own shard.
        per_replica_gradients, per_replica_totals = [], []
        for replica, (images, labels) in zip(self.replicas, shards, strict=True):
            with tf.device(replica.device):
                gradients_of = self.compiled(functools.partial(self._gradients, replica.model))
                loss, totals, gradients = gradients_of(images, labels, tf.size(global_labels))
                # Here `verify` writes down what it proves; in a training nobody looks on.
                shard = Shard(images, labels, tf.size(global_labels))
                gradients = self.observer.before_all_reduce(
                    replica.replica_id, shard, loss, gradients
                )
            per_replica_gradients.append(gradients)
            per_replica_totals.append(totals)

        # 3. Every device gets the sum of all the gradients.
        per_replica_sums = self.all_reduce(per_replica_gradients)

        # 4. The same update everywhere.
        for replica, sums in zip(self.replicas, per_replica_sums, strict=True):
            with tf.device(replica.device):
                sums = self.observer.after_all_reduce(replica.replica_id, sums)
                replica.optimizer.apply(sums, replica.model.trainable_variables)
        return StepTotals.sum(per_replica_totals)

    def _gradients(
        self,
        model: keras.Model,
        images: tf.Tensor,
        labels: tf.Tensor,
        num_global_examples: tf.Tensor,
    ) -> LossAndGradients:
        """Differentiates the part that one shard has in the loss of the global batch.

        That is the sum of the shard's losses over the number of *all* examples. So the sum of the
        replicas' gradients is the gradient of the mean over the global batch, whatever the sizes of
        the shards.
        """
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss, totals = shard_loss(
                logits, labels, num_global_examples, label_smoothing=self.label_smoothing
            )
        variables = model.trainable_variables
        gradients = differentiate(tape, loss, variables, loss_scale=self.loss_scale)
        return loss, totals, gradients

    def all_reduce(self, per_replica_tensors: PerReplicaTensors) -> PerReplicaTensors:
        if self.no_sync:
            return per_replica_tensors
        return all_reduce(
            per_replica_tensors,
            self.devices,
            algorithm=self.algorithm,
            gradient_buckets=self.gradient_buckets(per_replica_tensors[0]),
        )

    def repeat_all_reduce(
        self, per_replica_tensors: PerReplicaTensors, num_times: int
    ) -> PerReplicaTensors:
        return self._all_reduce_loop(per_replica_tensors, tf.constant(num_times))

    @tf.function
    def _all_reduce_loop(
        self, per_replica_tensors: PerReplicaTensors, num_times: tf.Tensor
    ) -> PerReplicaTensors:
        for _ in tf.range(num_times):
            per_replica_tensors = self.all_reduce(per_replica_tensors)
        return per_replica_tensors

    def forward(self, iterator: BatchIterator) -> list[LogitsAndTotals]:
        global_images, global_labels = next(iterator)
        shards = split_batch((global_images, global_labels), self.devices)
        per_replica_results = []
        for replica, (images, labels) in zip(self.replicas, shards, strict=True):
            with tf.device(replica.device):
                logits = classify(replica.model, images)
                _, totals = shard_loss(logits, labels, tf.size(global_labels))
            per_replica_results.append((logits, totals))
        return per_replica_results

    def replica_variables(self) -> list[list[tf.Variable]]:
        return [
            [v.value for v in replica.model.variables + replica.optimizer.variables]
            for replica in self.replicas
        ]
