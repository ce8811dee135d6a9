"""Changes settings of TensorFlow and Keras."""

_NO_REWRITE = "arithmetic_optimization"


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
