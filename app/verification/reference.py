"""Computes the expected result of a training step, on one device and without a strategy.

Shares no code with the strategies, not even the scaling of the loss, so that it is an independent
reference.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Self

import keras
import numpy as np
import tensorflow as tf

from app.training.training_spec import TrainingSpec
from strategies.tf_private import flatten_layers

Arrays = dict[str, np.ndarray]
Forward = Callable[[keras.Model, tf.Tensor], tf.Tensor]


class ShardResult(NamedTuple):
    """The contribution of a shard to a step: tensor → array.

    Attributes:
        loss: its part of the mean loss of the global batch, a scalar.
        gradients: gradients of `loss`.
        statistics: BatchNorm's moving statistics after this shard.
    """

    loss: np.ndarray
    gradients: Arrays
    statistics: Arrays


LOSS_SCALE = "loss_scale"  # The optimizer's variable, with gradients in float16.


class Reference:
    """Computes single steps of a training, from any state and in any order of summation.

    Args:
        model_fn: builds the model.
        optimizer_fn: creates the optimizer.
        dtype: "float64" or "float32", dtype of every variable.
        precision: Keras' dtype policy of the layers; None for `dtype`.
        label_smoothing: fraction of the target that is spread evenly over all classes.
        mean_of_squares: compute BatchNorm's variance as the mean of squares minus the square of the
            mean, the formula of Keras' `synchronized=True`.

    Attributes:
        initial_state: initial weights, statistics and optimizer state.
    """

    def __init__(
        self,
        model_fn: Callable[[], keras.Model],
        optimizer_fn: Callable[[], keras.optimizers.Optimizer],
        dtype: str,
        *,
        precision: str | None = None,
        label_smoothing: float = 0.0,
        mean_of_squares: bool = False,
    ):
        self._dtype, self._label_smoothing = dtype, label_smoothing
        policy = keras.config.dtype_policy()
        keras.config.set_floatx(dtype)
        keras.config.set_dtype_policy(precision or dtype)
        self._model, self._optimizer = model_fn(), optimizer_fn()
        self._optimizer.build(self._model.trainable_variables)
        for layer in flatten_layers(self._model):
            if mean_of_squares and isinstance(layer, keras.layers.BatchNormalization):
                layer.synchronized = True
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
        floats = [v for v in self._model.variables if np.issubdtype(np.dtype(v.dtype), np.floating)]
        self._weights = {v.path: v.value for v in floats if v.trainable}
        self._statistics = {v.path: v.value for v in floats if not v.trainable}
        self._optimizer_state = {
            v.path.partition("/")[2]: v.value for v in self._optimizer.variables
        }
        self.initial_state = _read({**self._weights, **self._statistics, **self._optimizer_state})
        # Of unknown batch size, as in a strategy: a known size may select other kernels.
        spec = tf.TensorSpec
        self._compiled_gradients = tf.function(
            self._shard_gradients,
            input_signature=[
                spec((None, *self._model.input_shape[1:]), tf.uint8),
                spec((None,), tf.int32),
                spec((), dtype),
            ],
            autograph=False,
        )

    @classmethod
    def of(cls, spec: TrainingSpec, dtype: str, **options: Any) -> Self:
        """Creates the reference of a training; in float64 for any precision of the training."""
        return cls(
            spec.build_model,
            spec.create_optimizer,
            dtype,
            precision=spec.config.training.precision if dtype == "float32" else None,
            label_smoothing=spec.label_smoothing,
            **options,
        )

    @property
    def has_batch_norm(self) -> bool:
        """Whether shards are normalised separately, so that the assignment of examples matters."""
        return bool(self._statistics)

    @property
    def names(self) -> dict[str, list[str]]:
        """Returns the names of the tensors of each kind of state, in the order of the model."""
        return {
            "slots": list(self._optimizer_state),
            "weights": list(self._weights),
            "statistics": list(self._statistics),
        }

    def gradients(
        self,
        before: Mapping[str, np.ndarray],
        images: np.ndarray,
        labels: np.ndarray,
        shards: Sequence[np.ndarray],
        *,
        per_shard_statistics: Sequence[Mapping[str, np.ndarray]] | None = None,
        forward: Forward | None = None,
    ) -> list[ShardResult]:
        """Computes the contributions of the shards, one after another.

        The gradient of the mean loss over the global batch is the sum of the contributions. Only
        BatchNorm depends on the shards: each shard is normalised by its own statistics, as on each
        replica (`--batch_norm=average`).

        Args:
            before: state before the step.
            images: uint8 `(n, height, width, channels)`, the global batch.
            labels: integers `(n,)`.
            shards: for each shard, its rows of the global batch, in order.
            per_shard_statistics: moving statistics of each shard before the step; None for those of
                `before`.
            forward: computes logits from the model and images instead of the model's call.
        """
        _assign(self._weights, before)
        self._assign_loss_scale(before)
        function, results = self._compiled_gradients, []
        if forward:
            function = functools.partial(self._shard_gradients, forward=forward)
        for rows, statistics in zip(
            shards, per_shard_statistics or [before] * len(shards), strict=True
        ):
            _assign(self._statistics, statistics)
            loss, gradients = function(
                tf.constant(images[rows]),
                tf.constant(labels[rows], tf.int32),
                tf.constant(len(labels), self._dtype),
            )
            results.append(
                ShardResult(
                    loss.numpy(),
                    dict(zip(self._weights, (g.numpy() for g in gradients), strict=True)),
                    _read(self._statistics),
                )
            )
        return results

    @property
    def scales_loss(self) -> bool:
        """Whether gradients are computed with a loss scale, so that they may overflow."""
        return LOSS_SCALE in self._optimizer_state

    def _assign_loss_scale(self, before: Mapping[str, np.ndarray]) -> None:
        if self.scales_loss:
            _assign({LOSS_SCALE: self._optimizer_state[LOSS_SCALE]}, before)

    def update(self, before: Mapping[str, np.ndarray], sums: Mapping[str, np.ndarray]) -> Arrays:
        """Returns weights and optimizer state after an update with these summed gradients."""
        _assign({**self._weights, **self._optimizer_state}, before)
        self._apply([tf.cast(sums[name], self._dtype) for name in self._weights])
        return _read({**self._weights, **self._optimizer_state})

    def _shard_gradients(
        self,
        images: tf.Tensor,
        labels: tf.Tensor,
        num_global_examples: tf.Tensor,
        forward: Forward = lambda model, images: model(images, training=True),
    ) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = self._loss(forward(self._model, images), labels, num_global_examples)
        return loss, self._differentiate(tape, loss, self._model.trainable_variables)

    def _differentiate(
        self, tape: tf.GradientTape, loss: tf.Tensor, weights: Sequence[tf.Tensor | tf.Variable]
    ) -> list[tf.Tensor]:
        if not self.scales_loss or self._dtype == "float64":
            return tape.gradient(loss, weights)
        start = tf.convert_to_tensor(self._optimizer_state[LOSS_SCALE])
        return [g / start for g in tape.gradient(loss, weights, output_gradients=start)]

    def _loss(
        self, logits: tf.Tensor, labels: tf.Tensor, num_global_examples: tf.Tensor
    ) -> tf.Tensor:
        logits = tf.cast(logits, self._dtype)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        if self._label_smoothing:
            evenly = -tf.reduce_mean(tf.nn.log_softmax(logits), axis=-1)
            losses += self._label_smoothing * (evenly - losses)
        return tf.reduce_sum(losses) / num_global_examples

    @tf.function(autograph=False)
    def _apply(self, gradients: list[tf.Tensor]) -> None:
        self._optimizer.apply(gradients, self._model.trainable_variables)


def _read(variables: Mapping[str, tf.Variable]) -> Arrays:
    return {name: variable.numpy() for name, variable in variables.items()}


def _assign(variables: Mapping[str, tf.Variable], values: Mapping[str, np.ndarray]) -> None:
    for name, variable in variables.items():
        variable.assign(values[name].astype(variable.dtype.as_numpy_dtype, copy=False))
