"""The settings of TensorFlow and Keras that a command changes: restored when the command ends.

Devices and threads are not among them: TensorFlow fixes both when it uses its first device.
"""

import logging

from app.runtime import run_context

_NO_REWRITE = "arithmetic_optimization"


def restore_at_end() -> None:
    """Has the settings as they are now restored at the end of the command, if there is one."""
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
    """Has the level of TensorFlow's Python messages restored at the end of the command."""
    context, log = run_context.current(), logging.getLogger("tensorflow")
    if context:
        context.at_end(log.setLevel, log.level)


def settle_keras() -> None:
    """Sets what a user's own keras.json may have changed, and what all models here rely on."""
    import keras

    keras.config.set_floatx("float32")
    keras.config.set_image_data_format("channels_last")


def keep_order_of_summation() -> None:
    """Forbids TensorFlow to rewrite sums, so that (a + b) + c is computed as it stands.

    Its graph optimizer turns a chain of additions into one `AddN`, which adds in an order of its
    own: with three replicas or more the gradients of `manual` and `mirrored` then differ in the
    last bit. Measured: an epoch takes as long with as without.
    """
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({_NO_REWRITE: False})
