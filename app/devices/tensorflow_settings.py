"""Changes settings of TensorFlow and Keras, which are restored at the end of the command.

Does not restore devices and threads, which TensorFlow fixes at its first use of a device.
"""

import logging

from app.runtime import run_context

_NO_REWRITE = "arithmetic_optimization"


def restore_at_end() -> None:
    """Registers the current settings to be restored at the end of the command, if any."""
    context = run_context.current()
    if context is None:
        return
    import keras
    import tensorflow as tf

    from strategies import tf_private

    experimental = tf.config.experimental
    if not tf_private.is_op_determinism_enabled():
        context.at_end(tf_private.disable_op_determinism)
    context.at_end(
        experimental.enable_tensor_float_32_execution,
        experimental.tensor_float_32_execution_enabled(),
    )
    rewrites = tf.config.optimizer.get_experimental_options().get(_NO_REWRITE)
    context.at_end(tf.config.optimizer.set_experimental_options, {_NO_REWRITE: rewrites})
    context.at_end(keras.config.set_image_data_format, keras.config.image_data_format())
    context.at_end(keras.config.set_floatx, keras.config.floatx())
    context.at_end(keras.config.set_dtype_policy, keras.config.dtype_policy())


def restore_logging_at_end() -> None:
    """Registers the Python log level of TensorFlow to be restored at the end of the command."""
    context, log = run_context.current(), logging.getLogger("tensorflow")
    if context:
        context.at_end(log.setLevel, log.level)


def settle_keras() -> None:
    """Sets the Keras settings that the models rely on, which a user's keras.json may change."""
    import keras

    keras.config.set_floatx("float32")
    keras.config.set_image_data_format("channels_last")


def keep_order_of_summation() -> None:
    """Disables TensorFlow's rewriting of sums, so that (a + b) + c is computed as written.

    The graph optimizer replaces a chain of additions with one `AddN`, which adds in another order:
    with three or more replicas, the gradients of `manual` and `mirrored` would differ in the last
    bit.
    Measured: the time of an epoch does not change.
    """
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({_NO_REWRITE: False})
