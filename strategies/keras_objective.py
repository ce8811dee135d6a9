"""Computes loss and gradients of a compiled Keras model, for strategies that split the data.

Any loss works, not only a mean over examples: the divisor of weighted means and masks depends on
the whole batch, and a contrastive loss compares examples with each other. The loss is therefore
computed for the whole global batch. A step 1. computes on each device the predictions for its own
examples, 2. gathers them and computes the loss of the whole batch and its gradient with respect to
each prediction, and 3. runs the backward pass on each device from its own part of that gradient.
The sum of the replicas' gradients then equals the gradient on one device, for any loss.

Losses that layers add (`model.losses`) are means over a replica's examples or depend only on
weights: a replica with n of N examples adds n / N of them.

A custom `train_step` computes a loss that the strategy cannot access. It runs on each replica's
examples; the gradients that it passes to its optimizer are weighted by n / N.

The model's code runs as on one device; see `one_device.py`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from strategies.batch_structure import BatchStructure, leaves_with_rows, present
from strategies.keras_private import (
    build_compiled,
    compiled_loss,
    get_mask,
    set_mask,
    takes_training,
)
from strategies.one_device import ModelScope, OneDevice
from strategies.replica import Replica
from strategies.step_totals import StepTotals


class Forward(NamedTuple):
    """Holds the results of one replica's forward pass.

    Attributes:
        predictions: leaves `(n_r, ...)` of the model's predictions.
        masks: Keras masks of the predictions; None for a prediction without one.
        regular: scalar, the replica's part of `model.losses`.
        tape: tape that recorded the forward pass; None in evaluation.
    """

    predictions: list[tf.Tensor]
    masks: list[tf.Tensor | None]
    regular: tf.Tensor
    tape: tf.GradientTape | None = None


class KerasObjective:
    """Computes loss, gradients and metrics of a compiled model for a data-parallel strategy.

    Args:
        element_spec: the dataset's: `(x, y)` or `(x, y, sample_weight)`, each any nest.

    Attributes:
        largest_batch: examples in the largest batch; None if unknown.
        has_own_train_step: whether the model has a custom `train_step`; set by `prepare`.
        trained: indices of the trainable variables that have a gradient; set while tracing.
        metrics: name → value of the model's metrics over the last evaluation; see `keras_metrics`.
    """

    def __init__(self, element_spec: Any):
        self._batch = BatchStructure(element_spec)
        self._one_device = OneDevice()
        self.predicted: Any = None
        self.largest_batch: int | None = None
        self.has_own_train_step = False
        self.trained: list[int] = []
        self.metrics: dict[str, float] = {}

    @property
    def element_spec(self) -> Any:
        """The dataset's element spec, with None where elements have None."""
        return self._batch.spec

    def flatten(self, dataset: tf.data.Dataset) -> tf.data.Dataset:
        """Returns the dataset with each batch as a flat tuple of tensors."""
        return dataset.map(lambda *batch: tuple(present(batch)))

    def prepare(self, model: keras.Model) -> None:
        """Creates the variables of a model and of its optimizer, loss and metrics."""
        build_compiled(model, self.nest(self._batch.example()))
        self.has_own_train_step = type(model).train_step is not keras.Model.train_step

    def forward(self, replica: Replica, examples: Sequence[tf.Tensor], share: tf.Tensor) -> Forward:
        """Computes the predictions of a replica for its examples, in training mode.

        Args:
            replica: the replica whose model is called.
            examples: leaves `(n_r, ...)` of inputs, targets and weights.
            share: float scalar, n_r / N.
        """
        model = replica.model

        def call() -> Forward:
            with tf.GradientTape() as tape:
                x, _, _ = self._unpack(examples)
                y_pred = model(x, training=True) if takes_training(model) else model(x)
                # The mean over an empty shard is NaN.
                regular = tf.math.multiply_no_nan(added_losses(model), share)
                self.predicted, predictions = y_pred, leaves_with_rows(model, y_pred, examples)
            return Forward(predictions, [get_mask(p) for p in predictions], regular, tape)

        return self._one_device(replica, call)

    def loss(
        self,
        replica: Replica,
        batch: Sequence[tf.Tensor],
        predictions: Sequence[tf.Tensor],
        masks: Sequence[tf.Tensor | None],
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        """Computes the loss of the whole global batch, without the losses that layers add.

        Args:
            replica: the replica whose device computes the loss.
            batch: leaves `(N, ...)` of inputs, targets and weights.
            predictions: leaves `(N, ...)` of all replicas, in order.
            masks: masks of the predictions.

        Returns:
            The loss, a float32 scalar, and its gradient with respect to each of the predictions.
        """
        with tf.GradientTape() as tape:
            tape.watch(predictions)
            loss = self._loss(replica, batch, predictions, masks)
        zero = tf.UnconnectedGradients.ZERO
        return loss, tape.gradient(loss, predictions, unconnected_gradients=zero)

    def backward(
        self, replica: Replica, forward: Forward, gradients: Sequence[tf.Tensor]
    ) -> list[tf.Tensor]:
        """Returns the gradients of a replica, one for each variable that has one.

        Args:
            replica: the replica to differentiate.
            forward: its forward pass.
            gradients: gradients of the loss with respect to the replica's predictions.
        """
        assert forward.tape is not None
        with self._one_device.seen():  # Layers that all-reduce do so in the backward pass, too.
            found = forward.tape.gradient(
                [*forward.predictions, forward.regular],
                [weight.value for weight in replica.model.trainable_variables],
                [*gradients, tf.ones_like(forward.regular)],
            )
        return self._without_none(replica.model, found)

    def gradients_of_own_step(
        self, replica: Replica, examples: Sequence[tf.Tensor], share: tf.Tensor
    ) -> tuple[list[tf.Tensor], tf.Tensor]:
        """Runs the model's own `train_step` on a replica's examples, without its update.

        Args:
            replica: the replica whose model is trained.
            examples: leaves `(n_r, ...)` of inputs, targets and weights.
            share: float scalar, n_r / N.

        Returns:
            The replica's part of the gradients of the global batch, one for each variable that has
            one, and of the loss that the step reports; NaN if it reports none.

        Raises:
            ValueError: the step does not call its optimizer exactly once.
        """
        model, calls = replica.model, []

        def call() -> Any:
            with replacing(replica.optimizer, "apply", lambda g, v=None: calls.append((g, v))):
                return model.train_step(self.nest(examples))

        logs = self._one_device(replica, call)
        if len(calls) != 1:
            raise ValueError(
                f"train_step of {type(model).__name__} calls optimizer.apply {len(calls)} times; a"
                " strategy needs one call with the gradients of all weights"
            )
        gradients, variables = calls[0]
        pairs = zip(variables or model.trainable_variables, gradients, strict=True)
        gradient_of = {_path(variable): gradient for variable, gradient in pairs}
        found = [gradient_of.get(v.path) for v in model.trainable_variables]
        loss = logs.get("loss", float("nan")) if isinstance(logs, dict) else float("nan")
        loss = tf.reshape(tf.cast(loss, tf.float32), [])
        scaled = [g if g is None else share * tf.convert_to_tensor(g) for g in found]
        return self._without_none(model, scaled), tf.math.multiply_no_nan(loss, share)

    def weights(self, model: keras.Model) -> list[keras.Variable]:
        """Returns the variables for which `backward` has returned gradients."""
        return [model.trainable_variables[i] for i in self.trained]

    def predict(
        self, replica: Replica, examples: Sequence[tf.Tensor], statistics: dict[str, tf.Tensor]
    ) -> Forward:
        """Computes the predictions of a replica in evaluation; changes no state.

        Args:
            replica: the replica whose model is called, in inference mode.
            examples: leaves of inputs, targets and weights.
            statistics: path of a variable → tensor that replaces the replica's value.
        """
        model = replica.model

        def call() -> Forward:
            x, _, _ = self._unpack(examples)
            y_pred = model(x, training=False) if takes_training(model) else model(x)
            self.predicted, predictions = y_pred, leaves_with_rows(model, y_pred, examples)
            return Forward(predictions, [get_mask(p) for p in predictions], added_losses(model))

        return self._one_device(replica, call, statistics, assigns=False)

    def evaluate(
        self,
        replica: Replica,
        batch: Sequence[tf.Tensor],
        predictions: Sequence[tf.Tensor],
        masks: Sequence[tf.Tensor | None],
        regular: tf.Tensor,
        states: Sequence[tf.Tensor],
    ) -> tuple[StepTotals, list[tf.Tensor]]:
        """Computes the totals of a whole batch in evaluation, and updates the metric states.

        Args:
            replica: the replica whose model defines loss and metrics.
            batch: leaves of inputs, targets and weights.
            predictions: predictions of all replicas, in order.
            masks: masks of the predictions.
            regular: scalar, the losses of layers for the whole batch.
            states: metric states before this batch; see `keras_metrics`.

        Returns:
            The totals, and the metric states after this batch.
        """
        model, size = replica.model, tf.shape(batch[0])[0]
        x, y, sample_weight = self._unpack(batch)
        values = list(zip(model.metrics_variables, states, strict=True))
        with self._one_device.seen(), ModelScope(values) as scope:
            y_pred = self._predictions(predictions, masks)
            total = compiled_loss(model, x, y, y_pred, sample_weight, training=False)
            loss = tf.cast(total, tf.float32) - added_losses(model) + regular
            model.compute_metrics(x, y, y_pred, sample_weight=sample_weight)
        after = [scope.get_current_value(v) for v in model.metrics_variables]
        totals = StepTotals(
            tf.cast(loss, tf.float64) * tf.cast(size, tf.float64),
            tf.zeros([], tf.int64),
            tf.cast(size, tf.int64),
        )
        return totals, [tf.identity(state) for state in after]

    def _loss(
        self,
        replica: Replica,
        batch: Sequence[tf.Tensor],
        predictions: Sequence[tf.Tensor],
        masks: Sequence[tf.Tensor | None],
    ) -> tf.Tensor:
        model = replica.model

        def compute() -> tf.Tensor:
            x, y, sample_weight = self._unpack(batch)
            y_pred = self._predictions(predictions, masks)
            total = compiled_loss(model, x, y, y_pred, sample_weight, training=True)
            return tf.cast(total, tf.float32) - added_losses(model)  # Regularisation only.

        return self._one_device(replica, compute, assigns=False)

    def _predictions(
        self, predictions: Sequence[tf.Tensor], masks: Sequence[tf.Tensor | None]
    ) -> Any:
        leaves = [tf.identity(prediction) for prediction in predictions]
        for leaf, mask in zip(leaves, masks, strict=True):
            if mask is not None:
                set_mask(leaf, mask)
        return tf.nest.pack_sequence_as(self.predicted, leaves)

    def _without_none(self, model: keras.Model, gradients: Sequence[Any]) -> list[tf.Tensor]:
        """Returns the gradients that are not None and stores their indices in `trained`."""
        self.trained = [i for i, gradient in enumerate(gradients) if gradient is not None]
        found = [tf.convert_to_tensor(gradients[i]) for i in self.trained]
        for gradient, weight in zip(found, self.weights(model), strict=True):
            gradient.set_shape(weight.shape)  # Collectives and embeddings lose the shape.
        return found

    def nest(self, leaves: Sequence[tf.Tensor]) -> Any:
        """Returns the nested batch with the given leaves."""
        return self._batch.nest(leaves)

    def _unpack(self, leaves: Sequence[tf.Tensor]) -> tuple[Any, Any, Any]:
        return keras.utils.unpack_x_y_sample_weight(self.nest(leaves))


def added_losses(model: keras.Model) -> tf.Tensor:
    """Returns the sum of `model.losses`, a float32 scalar."""
    losses = [tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in model.losses]
    return tf.add_n(losses) if losses else tf.zeros([])


def _path(variable: Any) -> str:
    return variable.path if isinstance(variable, keras.Variable) else variable.name


@contextlib.contextmanager
def replacing(owner: Any, name: str, function: Callable) -> Iterator[None]:
    """Replaces a method of one object in a `with` block."""
    object.__setattr__(owner, name, function)
    try:
        yield
    finally:
        object.__delattr__(owner, name)
