"""Finds the devices on which a strategy places its variables and matrix products."""

import collections

import keras
import tensorflow as tf

PRODUCTS = "MatMul", "Conv2D", "Conv2DBackpropInput", "Conv2DBackpropFilter"


def short(device):
    """Returns "/device:CPU:1" for any name of that device."""
    return "/device:" + device.rpartition("device:")[2]


def devices_of_variables(variables):
    """Returns the devices of variables of TensorFlow or of Keras."""
    return {short((v.value if isinstance(v, keras.Variable) else v).device) for v in variables}


def step_graph(strategy, iterator):
    """Returns the graph of one training step, before TensorFlow's optimisations."""
    step = tf.function(lambda: strategy.train_step(iterator))
    return step.get_concrete_function().graph


def devices_of_products(graph):
    """Returns for each kind of product how many of them each device computes in a step's graph."""
    found = collections.defaultdict(collections.Counter)
    for operation in graph.get_operations():
        if operation.type in PRODUCTS:
            found[operation.type][short(operation.device)] += 1
    return {kind: dict(counts) for kind, counts in found.items()}
