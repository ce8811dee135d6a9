"""Data parallelism by hand: the whole of it, to be read from top to bottom.

Every device holds a full copy of the model, a *replica*. One step of training is

1. split the global batch into a shard for each replica;
2. on each device, the gradient of the loss over its own shard;
3. an all-reduce: every device gets the sum of all the gradients;
4. on each device, the same update with the same gradient.

Because all replicas start from the same weights and all make the same update, they stay equal, bit
for bit, without ever exchanging a weight. The loops over the replicas below run while the step is
*traced*; what they leave behind is one graph, in which all devices work at the same time.
"""

import tensorflow as tf

from strategies.base import StepTotals, Strategy
from strategies.collectives import all_reduce, broadcast, split_batch
from strategies.loss import shard_loss


class ManualStrategy(Strategy):
    """Replicas, gradient tapes and an all-reduce that one can read."""

    name = "manual"

    def __init__(self, devices, *, all_reduce="auto"):
        super().__init__(devices, all_reduce="sum_on_one" if all_reduce == "auto" else all_reduce)

    def build(self, model_fn, optimizer_fn):
        self.models, self.optimizers = [], []
        for device in self.devices:
            with tf.device(device):
                model, optimizer = model_fn(), optimizer_fn()
                optimizer.build(model.trainable_variables)
            self.models.append(model)
            self.optimizers.append(optimizer)
        self.model, self.optimizer = self.models[0], self.optimizers[0]
        self._replicate_weights()

    def _replicate_weights(self):
        """Copies the weights of replica 0 to all others: training starts from one point."""
        per_replica_weights = broadcast(self.models[0].variables, self.devices)
        for model, weights in zip(self.models, per_replica_weights, strict=True):
            for variable, weight in zip(model.variables, weights, strict=True):
                variable.assign(weight)

    def train_step(self, iterator):
        images, labels = next(iterator)
        num_global_examples = tf.size(labels)
        shards = split_batch((images, labels), self.devices)

        per_replica_gradients, totals = [], StepTotals.zeros()
        for device, model, (images, labels) in zip(self.devices, self.models, shards, strict=True):
            with tf.device(device):
                with tf.GradientTape() as tape:
                    logits = model(images, training=True)
                    loss, shard_totals = shard_loss(logits, labels, num_global_examples)
                gradients = tape.gradient(loss, model.trainable_variables)
            per_replica_gradients.append(gradients)
            totals = totals.plus(shard_totals)

        per_replica_gradients = all_reduce(
            per_replica_gradients, self.devices, algorithm=self.all_reduce
        )

        for replica_id, device in enumerate(self.devices):
            with tf.device(device):
                self.optimizers[replica_id].apply(
                    per_replica_gradients[replica_id], self.models[replica_id].trainable_variables
                )
        return totals

    def forward(self, iterator):
        images, labels = next(iterator)
        num_global_examples = tf.size(labels)
        per_replica_results = []
        shards = split_batch((images, labels), self.devices)
        for device, model, (images, labels) in zip(self.devices, self.models, shards, strict=True):
            with tf.device(device):
                logits = model(images, training=False)
                _, totals = shard_loss(logits, labels, num_global_examples)
            per_replica_results.append((logits, totals))
        return per_replica_results

    def distribute(self, dataset):
        return iter(dataset)

    def replica_variables(self):
        return [
            [variable.value for variable in model.variables + optimizer.variables]
            for model, optimizer in zip(self.models, self.optimizers, strict=True)
        ]
