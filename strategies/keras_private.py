"""Wraps the private Keras APIs needed to train a compiled model; see `tf_private.py`."""

from typing import Any

import keras
import tensorflow as tf

from strategies.tf_private import private


def build_compiled(model: keras.Model, batch: Any) -> None:
    """Creates all variables of a compiled model: its weights, optimizer state, loss and metrics.

    Keras does so within `fit`; there is no public API to do it without training.

    Args:
        model: a compiled model.
        batch: `(x, y)` or `(x, y, sample_weight)` of one example.
    """
    private(model, "_symbolic_build")(data_batch=batch)
    x, _, _ = keras.utils.unpack_x_y_sample_weight(batch)
    if not model.built or not model.variables:
        model(x)
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def compiled_loss(
    model: keras.Model, x: Any, y: Any, y_pred: Any, sample_weight: Any, *, training: bool
) -> tf.Tensor:
    """Returns the loss of a compiled model, including `model.losses`; 0 without a loss.

    The public `compute_loss` takes `training` or not, depending on the class that overrides it, and
    raises an error if only layers add losses.
    """
    own = type(model).compute_loss is not keras.Model.compute_loss
    if not own and private(model, "_compile_loss") is None and not model.losses:
        return tf.zeros([])
    return private(model, "_compute_loss")(
        x=x, y=y, y_pred=y_pred, sample_weight=sample_weight, training=training
    )


def takes_training(model: keras.Model) -> bool:
    """Returns whether Keras passes `training` to the model's `call`."""
    return private(model, "_call_has_training_arg")


def is_seed(model: keras.Model, variable: keras.Variable) -> bool:
    """Returns whether a variable is the state of a layer's seed generator."""
    layers = private(model, "_flatten_layers")()
    return any(
        generator.state is variable
        for layer in layers
        for generator in private(layer, "_seed_generators")
    )


def get_mask(prediction: tf.Tensor) -> tf.Tensor | None:
    """Returns the Keras mask of a tensor, or None."""
    from keras.src.backend import get_keras_mask

    return get_keras_mask(prediction)


def set_mask(prediction: tf.Tensor, mask: tf.Tensor) -> None:
    """Attaches a Keras mask to a tensor, which losses and metrics apply."""
    from keras.src.backend import set_keras_mask

    set_keras_mask(prediction, mask)


def inner_optimizer(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    """Returns the inner optimizer of a `LossScaleOptimizer`; any other optimizer as it is."""
    return getattr(optimizer, "inner_optimizer", optimizer)


def is_synchronized(layer: keras.layers.Layer) -> bool:
    """Returns whether a layer, or a layer inside it, synchronises BatchNorm over replicas."""
    layers = private(layer, "_flatten_layers")()
    return any(getattr(inner, "synchronized", False) for inner in layers)


def stored_value(variable: keras.Variable) -> tf.Variable:
    """Returns the `tf.Variable` of a Keras variable, also inside a `StatelessScope`."""
    return private(variable, "_value")
