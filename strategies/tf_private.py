"""Wraps the private TensorFlow and Keras APIs that the program uses.

A private API may change with any release. Each one is used only here, in a function that documents
why no public API is sufficient; `tests/training/test_tf_private.py` has a test for each, whose
message names the missing API.
"""

from typing import Any

import keras
import tensorflow as tf


def private(owner: object, name: str) -> Any:
    """Returns an attribute of a TensorFlow or Keras object.

    Raises:
        AttributeError: the installed release has no such attribute.
    """
    if not hasattr(owner, name):
        kind = owner if isinstance(owner, type) else type(owner)
        raise AttributeError(
            f"{kind.__module__}.{kind.__qualname__} has no private attribute {name} with TensorFlow"
            f" {tf.__version__} and Keras {keras.__version__}; install the releases that"
            " requirements.txt names"
        )
    return getattr(owner, name)


def disable_optimizer_all_reduce(optimizer: keras.optimizers.Optimizer) -> None:
    """Disables the optimizer's all-reduce of gradients in a replica context.

    Mutates the optimizer. Within `tf.distribute`, a Keras 3 optimizer sums the gradients over the
    replicas, and `apply` has no option to disable this. The strategies have already summed them, so
    that each gradient would count R times.
    """
    private(optimizer, "_all_reduce_sum_gradients")
    optimizer._all_reduce_sum_gradients = list  # `list` returns the same pairs.


def learning_rate_schedule(
    optimizer: keras.optimizers.Optimizer,
) -> keras.optimizers.schedules.LearningRateSchedule | None:
    """Returns the schedule of an optimizer, or None if its learning rate is a number.

    The public `optimizer.learning_rate` is only the schedule's value at the next step.
    """
    found = private(optimizer, "_learning_rate")
    return found if isinstance(found, keras.optimizers.schedules.LearningRateSchedule) else None


def reset_layer_numbers() -> None:
    """Resets Keras' numbering of unnamed layers, so that the next `Dense` is `dense`.

    The second model of a process would have `dense_2` where the first has `dense`; `verify` and
    checkpoints find tensors by name. `keras.utils.clear_session` resets the numbers, too, but also
    the dtype policy and the default graph, which the scope of a `tf.distribute` strategy needs.
    """
    from keras.src.utils import naming

    private(naming, "reset_uids")()


def post_key_value(key: str, text: str) -> None:
    """Stores a text in the coordination service of a cluster, for all workers.

    Workers have no other means of communication that does not need all of them.
    """
    private(_context(), "set_config_key_value")(key, text)


def wait_for_key_value(key: str, timeout_sec: float) -> str:
    """Waits until a worker has stored a text under a key, and returns the text.

    Raises:
        tf.errors.OpError: there is no text in time, or a worker is lost.
    """
    return private(_context(), "get_config_key_value")(key, int(1000 * timeout_sec))


def _context() -> Any:
    """Returns the eager runtime of this process."""
    from tensorflow.python.eager import context

    return private(context, "context")()
