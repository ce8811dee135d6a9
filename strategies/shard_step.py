"""What is computed on one shard, whatever the strategy: loss, gradients, update, logits."""

from collections.abc import Callable, Sequence

import keras
import tensorflow as tf

from strategies.collectives import weighted_bounds
from strategies.copies import Copies, Variables
from strategies.keras_objective import KerasObjective
from strategies.layer_calls import with_values
from strategies.loss import differentiate, differentiate_scaled, shard_loss
from strategies.observer import Shard
from strategies.prediction import predict_shard
from strategies.replica import Replica
from strategies.step_totals import StepTotals

Statistics = dict[str, tf.Tensor]
LogitsAndTotals = tuple[tf.Tensor, StepTotals]  # Of a shard; logits `(n_r, num_classes)`.


class ShardStep(Copies):
    """The computations on shards; see `base.Strategy` for the arguments that they depend on.

    Attributes:
        replicas: of this worker, once built.
        num_replicas: parts of a global batch that are worked on side by side; each is a shard, or
            several shards one after another.
        shards_per_replica: how many.
        shard_weights: the sizes of all shards in proportion to each other.
        objective: that of a compiled Keras model, in place of `loss`; None for our image models.
    """

    replicas: Sequence[Replica] = ()
    num_replicas: int
    shards_per_replica: int
    shard_weights: list[int]
    jit_compile: bool
    objective: KerasObjective | None
    _label_smoothing: float
    _loss_scale: float

    @property
    def replica_weights(self) -> list[int]:
        """The sizes of the replicas' parts in proportion to each other, as `shard_weights`."""
        num, weights = self.shards_per_replica, self.shard_weights
        return [sum(weights[i : i + num]) for i in range(0, len(weights), num)]

    def shard_bounds(
        self, num_examples: int | tf.Tensor, shard_id: int | tf.Tensor
    ) -> tuple[int | tf.Tensor, int | tf.Tensor]:
        """Returns where a shard starts and ends in a global batch."""
        return weighted_bounds(num_examples, self.shard_weights, shard_id)

    def shard_ids(self, replica_id: int) -> range:
        """Returns the shards of a replica."""
        first = replica_id * self.shards_per_replica
        return range(first, first + self.shards_per_replica)

    def build_replica(
        self,
        model_fn: Callable[[], keras.Model],
        optimizer_fn: Callable[[], keras.optimizers.Optimizer],
    ) -> tuple[keras.Model, keras.optimizers.Optimizer]:
        """Builds a model and its optimizer with all variables, on the device of the scope."""
        model, optimizer = model_fn(), optimizer_fn()
        if self.objective:
            self.objective.prepare(model)
        if not optimizer.built:
            optimizer.build(model.trainable_variables)
        return model, optimizer

    def new_statistics(self, model: keras.Model) -> list[list[keras.Variable]]:
        """Creates what `Replica.statistics` needs, on the device of the current scope."""
        if self.shards_per_replica == 1:
            return []
        own = model.non_trainable_variables
        return [own, *(copies_of(own) for _ in range(self.shards_per_replica - 1))]

    def shard_variables(self) -> list[Variables]:
        """Returns what each shard of this worker has of its own: name → variable."""
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
        """Computes a replica's part in the gradients of the global batch's mean loss.

        It is the gradient of the sum of the losses of its examples over the number of *all*
        examples. Summed over replicas with parts of any sizes, it is that of the mean over the
        global batch. A replica with several shards works on one after another, so that it needs
        memory for the activations of one, and adds their gradients in order.

        Args:
            replica: its weights are taken.
            examples: images `(n_r, height, width, channels)` and labels `(n_r,)`.
            num_global_examples: int scalar, examples in the whole global batch.

        Returns:
            The gradients, one for each trainable variable, and the totals of the examples.
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
        """Computes the part of one shard of a replica, its `index`-th."""

        def loss_and_gradients(
            images: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
        ) -> tuple[tf.Tensor, StepTotals, list[tf.Tensor]]:
            weights = replica.weights or replica.model.trainable_variables
            with tf.GradientTape() as tape:
                if replica.weights:
                    tape.watch(replica.weights)
                logits = with_values(
                    lambda: replica.model(images, training=True), replica.values(index)
                )
                loss, totals = self.loss(logits, labels, num_global_examples)
            return loss, totals, differentiate(tape, loss, weights, loss_scale=self._loss_scale)

        if self.jit_compile:
            loss_and_gradients = tf.function(loss_and_gradients, jit_compile=True)
        images, labels = shard
        loss, totals, gradients = loss_and_gradients(images, labels, num_global_examples)
        shard_id = replica.replica_id * self.shards_per_replica + index
        observed = Shard(images, labels, num_global_examples)
        return self.observer.on_shard(shard_id, observed, loss, gradients), totals

    def loss(
        self, logits: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
    ) -> tuple[tf.Tensor, StepTotals]:
        """Computes the part of a shard in the mean loss, see `shard_loss`, and its totals."""
        return shard_loss(
            logits, labels, num_global_examples, label_smoothing=self._label_smoothing
        )

    def loss_and_logits_gradient(
        self, logits: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
    ) -> tuple[tf.Tensor, StepTotals, tf.Tensor]:
        """Computes a shard's `loss`, its totals, and the gradient that a backward pass starts from.

        That gradient is multiplied by `loss_scale`; `unscale` divides what comes out of the pass.
        """
        with tf.GradientTape() as tape:
            tape.watch(logits)
            loss, totals = self.loss(logits, labels, num_global_examples)
        (gradient,) = differentiate_scaled(tape, loss, [logits], loss_scale=self._loss_scale)
        return loss, totals, gradient

    def unscale(self, gradients: list[tf.Tensor]) -> list[tf.Tensor]:
        """Returns gradients that were computed from `loss_and_logits_gradient`, to true scale."""
        if self._loss_scale == 1:
            return gradients
        return [gradient / self._loss_scale for gradient in gradients]

    def apply_gradients(self, replica: Replica, summed_gradients: list[tf.Tensor]) -> None:
        """Updates the weights of a replica with gradients that are summed over the shards."""
        model, objective = replica.model, self.objective
        weights = objective.weights(model) if objective else model.trainable_variables
        replica.optimizer.apply(summed_gradients, weights)
        self.observer.on_update(replica.replica_id, summed_gradients)

    def classify(
        self,
        replica: Replica,
        examples: Sequence[tf.Tensor],
        num_global_examples: tf.Tensor,
        statistics: Statistics,
    ) -> LogitsAndTotals:
        """Computes the logits of a replica's examples, which may be none, and their totals.

        Args:
            replica: its weights are taken.
            examples: images and labels.
            num_global_examples: int scalar, examples in the whole global batch.
            statistics: path of a variable → tensor to take in place of the replica's own.
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
    """Creates variables with the same values, on the device of the current scope."""
    return [
        keras.Variable(
            tf.convert_to_tensor(v.value),  # Of a variable, Keras would take the variable itself.
            dtype=v.dtype,
            trainable=v.trainable,
            name=v.path.replace("/", "_"),
        )
        for v in variables
    ]
