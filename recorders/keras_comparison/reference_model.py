"""Implements the reference: the user's model on one device, without a strategy."""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend import set_keras_mask  # Masks have no public access.

from .distances import EPS
from .layers import is_seed_of, leaf_layers, seeds_drawn, unit_of
from .modes import in_float64
from .recorder_imports import (
    Arrays,
    Hooks,
    Recording,
    inner_optimizer,
    is_float,
    leaves,
    regularisation,
    to_numpy_dtype,
)
from .tensors import from_json, to_numpy, to_tf


@dataclasses.dataclass
class StepResult:
    """The result of a training step on one device, without the update.

    Attributes:
        y_pred: leaves of the predictions, if the step calls `compute_loss`.
        loss: data loss and regularisation, if the step calls `compute_loss`.
        raw: gradients before clipping.
        after: all variables after the step; only statistics and seeds have changed.
    """

    y_pred: Arrays
    loss: tuple[float, float] | None
    raw: Arrays
    after: Arrays


class OneDevice:
    """Computes steps of a compiled model and its `train_step` on one device, without a strategy.

    Args:
        model: a compiled model, created outside of any strategy's scope.
        recording: provides states and examples.
        is_float64: whether the model was built `in_float64`.

    Raises:
        ValueError: the recording is of another model.
    """

    def __init__(self, model: keras.Model, recording: Recording, is_float64: bool = False):
        if tf.distribute.has_strategy() or model.distribute_strategy.num_replicas_in_sync > 1:
            raise ValueError("build the second model outside of the strategy's scope")
        if getattr(model, "optimizer", None) is None:
            raise ValueError(f"model {model.name} is not compiled; call model.compile first")
        self.model, self._recording, self._is_float64 = model, recording, is_float64
        self.optimizer = inner_optimizer(model.optimizer)
        self.scales_loss = self.optimizer is not model.optimizer
        first = recording.steps[0]["data", 0]
        x, _, _ = self.unpack([array[:1] for array in first])
        if not model.built or not model.variables:
            model(x)
        if not model.optimizer.built:
            model.optimizer.build(model.trainable_variables)
        self.state = [*model.variables, *model.optimizer.variables]
        self._check_same_model()
        drawn = seeds_drawn(recording)
        self.random_layers = [
            layer
            for layer in leaf_layers(model)
            if any(index in drawn for index, v in enumerate(self.state) if is_seed_of(layer, v))
        ]
        self.layers_with_statistics = [
            layer
            for layer in leaf_layers(model)
            if any(is_float(variable) for variable in layer.non_trainable_variables)
        ]

    def _check_same_model(self) -> None:
        shapes = [tuple(variable.shape) for variable in self.state]
        recorded = [array.shape for array in self._recording.steps[0]["before", 0]]
        for index, (own, other) in enumerate(zip(shapes, recorded, strict=False)):
            if own != other:
                path = self._recording.variables[index]["name"]
                raise ValueError(
                    f"variable {path} has shape {other} in the recording and {own} in the model"
                    f" {self.model.name}; build the model that was recorded"
                )
        if len(shapes) != len(recorded):
            raise ValueError(
                f"the recording has {len(recorded)} variables and the model {self.model.name}"
                f" {len(shapes)}; build and compile the model that was recorded"
            )

    @property
    def unit(self) -> float:
        """The largest distance between numbers near 1 in the layers' compute dtypes."""
        return max([EPS, *(unit_of(layer.compute_dtype) for layer in leaf_layers(self.model))])

    @property
    def units(self) -> list[float]:
        """The same for each variable's dtype."""
        return [unit_of(variable.dtype) for variable in self.state]

    def load(self, state: Arrays) -> None:
        """Assigns all variables."""
        for variable, array in zip(self.state, state, strict=True):
            variable.assign(tf.cast(array, variable.dtype))

    def step(
        self, state: Arrays, data: Arrays, *, scales: tuple[float, float] = (1.0, 1.0),
        starts: Arrays | None = None,
    ) -> StepResult:  # fmt: skip
        """Runs the model's own `train_step` from a state, without the update.

        Args:
            state: all variables.
            data: leaves of the examples.
            scales: factors of the data loss and of regularisation.
            starts: start of the backward pass, instead of the gradient of the data loss with
                respect to each prediction.
        """
        got = StepResult([], None, [], [])

        def compute_loss(inner: Callable, *args: Any, **kwargs: Any) -> tf.Tensor:
            loss, regular = inner(*args, **kwargs), regularisation(self.model)
            y_pred = kwargs["y_pred"] if "y_pred" in kwargs else args[2]
            regular = tf.cast(regular, loss.dtype)
            got.y_pred = [np.array(to_numpy_dtype(p)) for p in leaves(y_pred)]
            got.loss = float(tf.reduce_sum(loss) - regular), float(regular)
            data_loss = loss - regular
            if starts is not None:
                pairs = zip(leaves(y_pred), starts, strict=True)
                parts = [tf.reduce_sum(p * tf.cast(start, p.dtype)) for p, start in pairs]
                data_loss = tf.add_n([tf.cast(part, loss.dtype) for part in parts])
            return scales[0] * data_loss + scales[1] * regular

        def apply(inner: Callable, grads: Sequence, *args: Any, **kwargs: Any) -> None:
            got.raw = [to_numpy(g) for g in grads if g is not None]

        self.load(state)
        precision = in_float64() if self._is_float64 else contextlib.nullcontext()
        with Hooks() as hooks, precision:
            hooks.hook(self.model, "compute_loss", compute_loss)
            hooks.hook(self.optimizer, "apply", apply)
            self.model.train_step(from_json(self._recording.structure, self._tensors(data)))
        got.after = self._read()
        return got

    def loss(
        self, state: Arrays, data: Arrays, y_pred: Arrays, masks: Arrays, *, weighted: bool = True
    ) -> float:
        """Returns the loss of given predictions, without regularisation.

        Args:
            state: all variables.
            data: leaves of the examples.
            y_pred: leaves of the predictions.
            masks: one mask per prediction; scalars for none.
            weighted: apply sample weights and masks.
        """
        predictions = [tf.constant(array) for array in y_pred]
        return float(self._loss_of(state, data, predictions, masks, weighted))

    def loss_gradients(self, state: Arrays, data: Arrays, y_pred: Arrays, masks: Arrays) -> Arrays:
        """Returns the gradient of that loss with respect to each prediction."""
        predictions = [tf.constant(array) for array in y_pred]
        with tf.GradientTape() as tape:
            tape.watch(predictions)
            loss = self._loss_of(state, data, predictions, masks, True)
        zero = tf.UnconnectedGradients.ZERO
        return [g.numpy() for g in tape.gradient(loss, predictions, unconnected_gradients=zero)]

    def _loss_of(
        self, state: Arrays, data: Arrays, predictions: list[tf.Tensor], masks: Arrays,
        weighted: bool,
    ) -> tf.Tensor:  # fmt: skip
        x, y, sample_weight = self.unpack(data)
        self.load(state)
        if self.model.losses:
            self.model(x, training=True)  # Activity regularisers.
        predictions = [tf.identity(prediction) for prediction in predictions]
        for prediction, mask in zip(predictions, masks, strict=True):
            if mask.ndim and weighted:
                set_keras_mask(prediction, tf.constant(mask))
        loss = self.model.compute_loss(
            x=x,
            y=y,
            y_pred=from_json(self._recording.predicted, predictions),
            sample_weight=sample_weight if weighted else None,
        )
        return tf.reduce_sum(loss) - tf.cast(regularisation(self.model), loss.dtype)

    def clip(self, gradients: Arrays) -> Arrays:
        """Returns gradients after the optimizer's clipping."""
        return [to_numpy(g) for g in self.optimizer._clip_gradients(list(map(to_tf, gradients)))]

    def update(
        self, state: Arrays, sums: Arrays, *, clips: bool = False, rate: float = 1.0,
        decays: bool = True,
    ) -> Arrays:  # fmt: skip
        """Returns all variables after the optimizer's update with these gradients.

        Args:
            state: all variables before the update.
            sums: gradients of the weights named by `Recording.gradients`.
            clips: clip the gradients first.
            rate: factor of the learning rate.
            decays: whether the factor also applies to weight decay.
        """
        self.load(state)
        names = self._recording.gradients
        paths = [variable["name"] for variable in self._recording.variables]
        variables = [self.state[paths.index(name)] for name in names]
        with Hooks() as hooks:
            if not clips:
                hooks.hook(self.optimizer, "_clip_gradients", lambda inner, grads: grads)
            if rate != 1.0 and decays:
                name = "_get_current_learning_rate"
                hooks.hook(self.optimizer, name, lambda inner: rate * inner())
            elif rate != 1.0:
                name = "_backend_update_step"
                hooks.hook(self.optimizer, name, lambda inner, g, v, own: inner(g, v, rate * own))
            self.optimizer.apply(list(map(to_tf, sums)), variables)
        return self._read()

    def without(self, layers: Sequence[keras.layers.Layer], function: Callable[[], Any]) -> Any:
        """Calls a function with these layers in inference mode."""

        def inference(inner: Callable, *args: Any, **kwargs: Any) -> Any:
            return inner(*args, **{**kwargs, "training": False})

        with Hooks() as hooks:
            for layer in layers:
                if layer._call_has_training_arg:
                    hooks.hook(layer, "call", inference)
            return function()

    def step_in_float32(
        self, state: Arrays, data: Arrays, scales: tuple[float, float],
        starts: Arrays | None = None,
    ) -> StepResult | None:  # fmt: skip
        """Runs a step with float32 layers instead of bfloat16 or float16 layers.

        Random layers are not changed, because they would use other random numbers; neither are
        layers that contain them, such as an LSTM with dropout.

        Returns:
            The step; None if layers do not support float32.
        """

        def is_random(layer: keras.layers.Layer) -> bool:
            return any(part in self.random_layers for part in layer._flatten_layers())

        layers = [
            layer
            for layer in self.model._flatten_layers()
            if type(layer.dtype_policy) is keras.DTypePolicy
            and layer.compute_dtype != layer.variable_dtype == "float32"
            and (isinstance(layer, keras.Model) or not is_random(layer))
        ]
        policies = [layer.dtype_policy for layer in layers]
        try:
            for layer in layers:
                layer.dtype_policy = "float32"
            return self.step(state, data, scales=scales, starts=starts)
        except Exception:  # From the user's code, which may require another dtype.
            return None
        finally:
            for layer, policy in zip(layers, policies, strict=True):
                layer.dtype_policy = policy

    def unpack(self, data: Arrays) -> tuple[Any, Any, Any]:
        """Returns inputs, targets and sample weights."""
        nest = from_json(self._recording.structure, self._tensors(data))
        return keras.utils.unpack_x_y_sample_weight(nest)

    def _tensors(self, data: Arrays) -> list[tf.Tensor]:
        tensors = [tf.constant(array) for array in data]
        if not self._is_float64:
            return tensors
        return [tf.cast(t, tf.float64) if t.dtype.is_floating else t for t in tensors]

    def _read(self) -> Arrays:
        return [np.array(to_numpy_dtype(variable.value)) for variable in self.state]
