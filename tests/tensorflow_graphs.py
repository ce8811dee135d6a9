"""Private APIs of TensorFlow that only the tests use: many trainings share a process."""

import itertools


def release_graphs():
    """Releases the graphs of functions traced so far that nothing else holds.

    TensorFlow keeps the gradient of every `tf.custom_gradient` that it has traced, and every Python
    function within a graph, until the process ends, and with them their graphs: about 3 MB for each
    small training. Functions with custom gradients that were traced before can still be called;
    differentiating them again raises `LookupError`.
    """
    import tensorflow as tf
    from tensorflow.python.framework import ops

    gradients = ops.gradient_registry._registry
    for name in [name for name in gradients if name.startswith("CustomGradient-")]:
        del gradients[name]
    graph = tf.compat.v1.get_default_graph()
    if hasattr(graph, "_py_funcs_used_in_graph"):  # It has none before the first function.
        graph._py_funcs_used_in_graph = []


def number_device_groups():
    """Gives each `MirroredStrategy` other numbers for its groups of devices.

    Otherwise groups of different sizes in one process break every later collective.
    """
    import tensorflow as tf

    numbers = itertools.count(1_500_000_000, step=1000)
    tf.distribute.MirroredStrategy._collective_key_base = property(lambda self: next(numbers))
