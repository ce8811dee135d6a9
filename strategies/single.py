"""Training on one device, the reference for all other strategies."""

import tensorflow as tf

from strategies.base import (
    BatchIterator,
    ModelFn,
    OptimizerFn,
    Replica,
    Shard,
    Statistics,
    StepTotals,
    Strategy,
    classify,
    sum_of_losses,
)


class SingleStrategy(Strategy):
    """Trains one model on one device; the global batch is the only shard."""

    name = "single"

    def prepare(self) -> None:
        """Checks that there is one device."""
        if self.num_replicas != 1:
            raise ValueError(f"strategy single needs one device, got {self.num_replicas}")

    def default_all_reduce(self) -> str:
        """Returns "none"."""
        return "none"

    def build(self, model_fn: ModelFn, optimizer_fn: OptimizerFn) -> None:
        """Builds the only replica."""
        with tf.device(self.devices[0]):
            self.replicas = [Replica.build(model_fn, optimizer_fn)]

    def train_step(self, iterator: BatchIterator) -> StepTotals:
        """Trains on one global batch."""
        images, labels = next(iterator)
        shard, (replica,) = Shard(images, labels, tf.size(labels)), self.replicas
        with tf.device(self.devices[0]):
            with tf.GradientTape() as tape:
                logits = replica.model(images, training=True)
                loss_sum = sum_of_losses(logits, labels, self.label_smoothing)
                loss = loss_sum / tf.cast(shard.num_global_examples, tf.float32)
            gradients = tape.gradient(loss, replica.weights)
            gradients = self.observer.on_shard(0, shard, logits, loss, gradients)
            replica.optimizer.apply(gradients, replica.model.trainable_variables)
            self.observer.on_update(0, gradients)
        return StepTotals.of(logits, labels)

    def evaluate_step(self, iterator: BatchIterator, statistics: Statistics) -> StepTotals:
        """Evaluates one global batch."""
        images, labels = next(iterator)
        with tf.device(self.devices[0]):
            return classify(self.model, Shard(images, labels, tf.size(labels)), statistics)
