"""The names of Keras and TensorFlow that are not public, and what they are needed for.

Each is used here only. One that is missing is an error with the versions in one line: what it does
would not be seen.
"""

import functools
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.ops import control_flow_util

from lockstep.recorders import common

_NAME = f"record_keras: Keras {keras.__version__} on TensorFlow {tf.__version__}"
private = functools.partial(common.private, _NAME)
_attribute = functools.partial(common.attribute, _NAME)
_method = functools.partial(common.method, _NAME)
_BRANCHES = ("CondBranchFuncGraph", "WhileBodyFuncGraph")  # Bodies of conditions and loops.

weights_of = _attribute("_trainable_variables")  # Those that an optimizer was built with.
_uses_weight_decay = _method("_use_weight_decay")
layers_of = _method("_flatten_layers")  # The layers in a layer or model, with it.
layers_in = _attribute("_layers")  # Those in it, not in its parts.
_own_part = _method("_aggregate_additional_loss")


def hook_update(
    hooks: common.Hooks, optimizer: keras.optimizers.Optimizer, apply: Callable, clip: Callable,
    all_reduce: Callable,
) -> None:  # fmt: skip
    """Replaces what an optimizer applies, clips and reduces gradients with.

    It hooks the instance: a subclass may have methods of its own.
    """
    names = ("_backend_apply_gradients", "_clip_gradients", "_all_reduce_sum_gradients")
    for name, function in zip(names, (apply, clip, all_reduce), strict=True):
        private(optimizer, name)
        hooks.hook(optimizer, name, function)


def weight_decay_of(optimizer: keras.optimizers.Optimizer, weight: Any) -> float:
    """Returns the weight decay of a weight, which can be excluded from it."""
    decays = optimizer.weight_decay and _uses_weight_decay(optimizer, weight)
    return optimizer.weight_decay if decays else 0.0


def regularisation(model: keras.Model) -> tf.Tensor:
    """Returns the sum of `model.losses` for this replica."""
    losses = [_own_part(model, loss) for loss in model.losses]
    return tf.add_n(losses) if losses else tf.zeros(())


def is_in_xla() -> bool:
    """Returns whether XLA compiles the function that is traced."""
    graph = tf.compat.v1.get_default_graph()
    return bool(private(control_flow_util, "GraphOrParentsInXlaContext")(graph))


def is_in_branch() -> bool:
    """Returns whether a branch of a condition, or the body of a loop, is traced."""
    graph = tf.compat.v1.get_default_graph()
    while graph is not None:
        if type(graph).__name__ in _BRANCHES:
            return True
        graph = getattr(graph, "outer_graph", None)
    return False
