"""An all-reduce that passes its demonstration and does not change the gradients of a training.

An edition of "Dive into Deep Learning" had it, in PyTorch (d2l-ai/d2l-zh, pull request 955). Here
the gradients are in variables, because only those can be written into.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

LEARNING_RATE = 0.1


def wrong_all_reduce(data: list[Any]) -> None:
    """Sums into the first variable, then replaces the list's other items by copies."""
    for i in range(1, len(data)):
        data[0].assign_add(data[i])
    for i in range(1, len(data)):
        with tf.device(data[i].device):
            data[i] = tf.identity(data[0])


def right_all_reduce(data: list[Any]) -> None:
    """Sums into the first variable, then writes the sum into the others."""
    for i in range(1, len(data)):
        data[0].assign_add(data[i])
    for i in range(1, len(data)):
        data[i].assign(data[0])


class Outcome(NamedTuple):
    """What is there after a training step, one item for each device, `(1, 2)` each.

    Attributes:
        data: items of the list that the all-reduce was given.
        gradients: the variables that hold the gradients of the training.
        weights: the weights after the update.
    """

    data: list[Any]
    gradients: list[tf.Variable]
    weights: list[tf.Variable]


def train_step(all_reduce: Callable[[list[Any]], None], gradients: Sequence[tf.Tensor]) -> Outcome:
    """Makes one update of weights that are 1 on each device.

    Args:
        all_reduce: sums the items of a list over the devices.
        gradients: the gradient of each device, on that device.
    """
    per_replica_gradients, per_replica_weights = [], []
    for gradient in gradients:
        with tf.device(gradient.device):
            per_replica_gradients.append(tf.Variable(gradient))
            per_replica_weights.append(tf.Variable(tf.ones_like(gradient)))
    data = list(per_replica_gradients)
    all_reduce(data)
    for weight, gradient in zip(per_replica_weights, per_replica_gradients, strict=True):
        weight.assign_sub(LEARNING_RATE * gradient)
    return Outcome(data, per_replica_gradients, per_replica_weights)
