"""Names of unnamed layers. The one place that uses a private API of Keras for them."""

from keras.src.utils import naming


def reset_layer_numbers() -> None:
    """Makes Keras number unnamed layers from the start: the next `Dense` is `dense`.

    Keras counts the unnamed layers of a process, so that the second model built there would have
    `dense_2` where the first has `dense`. Built right after this, a model has the same names in
    every process and on every replica, by which `verify` and checkpoints find tensors.

    `keras.utils.clear_session` does this too, but also forgets the dtype policy and replaces the
    default graph, on which the scope of a `tf.distribute` strategy lies.
    """
    naming.reset_uids()
