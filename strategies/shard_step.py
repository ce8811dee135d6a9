"""Computes loss, gradients, update and logits of a shard, for every strategy."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from strategies.collectives import weighted_bounds
from strategies.copies import Copies, Variables
from strategies.layer_calls import with_values
from strategies.loss import differentiate, differentiate_scaled, shard_loss, unscaled
from strategies.loss_scale import loss_scale_of
from strategies.observer import Shard
from strategies.prediction import predict_shard
from strategies.replica import Replica
from strategies.step_totals import StepTotals

Statistics = dict[str, tf.Tensor]
LogitsAndTotals = tuple[tf.Tensor, StepTotals]  # Of a shard; logits `(n_r, num_classes)`.


class ShardStep(Copies):
    """Implements the computations on shards; `base.Strategy` documents their parameters.

    Attributes:
        replicas: the replicas of this worker, after `build`.
        num_replicas: parts of a global batch that are processed in parallel; each is one shard, or
            several shards in sequence.
        shards_per_replica: number of shards of each replica.
        shard_weights: relative sizes of all shards.
    """

    replicas: Sequence[Replica] = ()
    num_replicas: int
    shards_per_replica: int
    shard_weights: list[int]
    jit_compile: bool
    _label_smoothing: float

    @property
    def loss_scale(self) -> tf.Tensor | None:
        """The loss scale of this step; None without loss scaling."""
        return loss_scale_of(self.optimizer)

    @property
    def replica_weights(self) -> list[int]:
        """Relative sizes of the replicas' parts."""
        num, weights = self.shards_per_replica, self.shard_weights
        return [sum(weights[i : i + num]) for i in range(0, len(weights), num)]

    def shard_bounds(
        self, num_examples: int | tf.Tensor, shard_id: int | tf.Tensor
    ) -> tuple[int | tf.Tensor, int | tf.Tensor]:
        """Returns the start and end of a shard in a global batch."""
        return weighted_bounds(num_examples, self.shard_weights, shard_id)

    def shard_ids(self, replica_id: int) -> range:
        """Returns the ids of a replica's shards."""
        first = replica_id * self.shards_per_replica
        return range(first, first + self.shards_per_replica)

    def build_replica(
        self,
        model_fn: Callable[[], keras.Model],
        optimizer_fn: Callable[[], keras.optimizers.Optimizer],
    ) -> tuple[keras.Model, keras.optimizers.Optimizer]:
        """Builds a model and its optimizer with all variables, on the current device."""
        model, optimizer = model_fn(), optimizer_fn()
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        return model, optimizer

    def new_statistics(self, model: keras.Model) -> list[list[keras.Variable]]:
        """Creates the variables of `Replica.statistics` on the current device."""
        if self.shards_per_replica == 1:
            return []
        own = model.non_trainable_variables
        return [own, *(copies_of(own) for _ in range(self.shards_per_replica - 1))]

    def shard_variables(self) -> list[Variables]:
        """Returns the per-shard variables of each shard of this worker: name → variable."""
        if not any(replica.statistics for replica in self.replicas):
            return super().shard_variables()
        names = [f"model/{v.path}" for v in self.model.non_trainable_variables]
        return [
            {name: variable.value for name, variable in zip(names, own, strict=True)}
            for replica in self.replicas
            for own in replica.statistics
        ]

    def local_gradients(
        self, replica: Replica, examples: Sequence[tf.Tensor], num_global_examples: tf.Tensor
    ) -> tuple[list[tf.Tensor], StepTotals]:
        """Computes a replica's part of the gradients of the global batch's mean loss.

        The result is the gradient of (sum of the losses of its examples) / (number of *all*
        examples). Its sum over the replicas, with parts of any size, is the gradient of the mean
        over the global batch. A replica with several shards processes them in sequence, so that it
        needs memory for the activations of one shard, and adds their gradients in order.

        Args:
            replica: the replica whose weights are used.
            examples: images `(n_r, height, width, channels)` and labels `(n_r,)`.
            num_global_examples: int scalar, number of examples in the global batch.

        Returns:
            One gradient per trainable variable, and the totals of the examples.
        """
        num = self.shards_per_replica
        if num == 1:
            return self._shard_gradients(replica, 0, examples, num_global_examples)
        sums: list[tf.Tensor] = []
        totals = []
        first, _ = self.shard_bounds(num_global_examples, replica.replica_id * num)
        for index in range(num):
            shard_id = replica.replica_id * num + index
            start, end = self.shard_bounds(num_global_examples, shard_id)
            with tf.control_dependencies(sums):
                shard = [tensor[start - first : end - first] for tensor in examples]
                gradients, shard_totals = self._shard_gradients(
                    replica, index, shard, num_global_examples
                )
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients
            totals.append(shard_totals)
        return sums, StepTotals.sum(totals)

    def _shard_gradients(
        self,
        replica: Replica,
        index: int,
        shard: Sequence[tf.Tensor],
        num_global_examples: tf.Tensor,
    ) -> tuple[list[tf.Tensor], StepTotals]:
        """Computes gradients and totals of the `index`-th shard of a replica."""
        loss_scale = self.loss_scale

        def loss_and_gradients(
            images: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
        ) -> tuple[tf.Tensor, tf.Tensor, StepTotals, list[tf.Tensor]]:
            weights = replica.weights or replica.model.trainable_variables
            with tf.GradientTape() as tape:
                if replica.weights:
                    tape.watch(replica.weights)
                logits = with_values(
                    lambda: replica.model(images, training=True), replica.values(index)
                )
                loss, totals = self.loss(logits, labels, num_global_examples)
            gradients = differentiate(tape, loss, weights, loss_scale=loss_scale)
            return logits, loss, totals, gradients

        if self.jit_compile:
            loss_and_gradients = tf.function(loss_and_gradients, jit_compile=True)
        images, labels = shard
        logits, loss, totals, gradients = loss_and_gradients(images, labels, num_global_examples)
        shard_id = replica.replica_id * self.shards_per_replica + index
        observed = Shard(images, labels, num_global_examples, logits)
        return self.observer.on_shard(shard_id, observed, loss, gradients), totals

    def loss(
        self, logits: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
    ) -> tuple[tf.Tensor, StepTotals]:
        """Computes a shard's part of the mean loss and its totals; see `shard_loss`."""
        return shard_loss(
            logits, labels, num_global_examples, label_smoothing=self._label_smoothing
        )

    def loss_and_logits_gradient(
        self, logits: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
    ) -> tuple[tf.Tensor, StepTotals, tf.Tensor]:
        """Computes a shard's `loss`, its totals, and the scaled gradient by the logits.

        The gradient is multiplied by `loss_scale`; `unscale` divides the results of the backward
        pass.
        """
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss, totals = self.loss(logits, labels, num_global_examples)
        (gradient,) = differentiate_scaled(tape, loss, [logits], loss_scale=self.loss_scale)
        return loss, totals, gradient

    def unscale(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Divides gradients computed from `loss_and_logits_gradient` by the loss scale."""
        return unscaled(gradients, self.loss_scale)

    def apply_gradients(self, replica: Replica, summed_gradients: list[tf.Tensor]) -> None:
        """Updates the weights of a replica with the gradients summed over all shards."""
        replica.optimizer.apply(summed_gradients, replica.model.trainable_variables)
        self.observer.on_update(replica.replica_id, summed_gradients)

    def classify(
        self,
        replica: Replica,
        examples: Sequence[tf.Tensor],
        num_global_examples: tf.Tensor,
        statistics: Statistics,
    ) -> LogitsAndTotals:
        """Computes the logits and totals of a replica's examples, which may be empty.

        Args:
            replica: the replica whose weights are used.
            examples: images and labels.
            num_global_examples: int scalar, number of examples in the global batch.
            statistics: path of a variable → tensor that replaces the replica's value.
        """
        images, labels = examples
        replaced = dict(statistics)
        if replica.weights:
            paths = [variable.path for variable in replica.model.trainable_variables]
            replaced.update(zip(paths, replica.weights, strict=True))
        logits = predict_shard(replica.model, images, replaced)
        _, totals = shard_loss(logits, labels, num_global_examples)
        return logits, totals


def copies_of(variables: Sequence[keras.Variable]) -> list[keras.Variable]:
    """Creates variables with the same values on the current device."""
    return [
        keras.Variable(
            tf.convert_to_tensor(v.value),  # Given a variable, Keras would reuse it.
            dtype=v.dtype,
            trainable=v.trainable,
            name=v.path.replace("/", "_"),
        )
        for v in variables
    ]
