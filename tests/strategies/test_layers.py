"""Layers of the models: the same results and gradients as Keras' layers of these names."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from models import layers
from tests.small_models import build_network

# Policy → largest distance, relative to the largest number: roundings of the policy's numbers.
DTYPES = {"float32": 2e-6, "mixed_bfloat16": 2e-2, "float64": 1e-14}


def results(layer, images, upstream):
    """Returns what a layer computes in training: output, gradients and statistics."""

    @tf.function(autograph=False)
    def compute(images, upstream):
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = layer(images, training=True)
            target = tf.reduce_sum(outputs * tf.cast(upstream, outputs.dtype))
        sources = [images, *(variable.value for variable in layer.trainable_variables)]
        return outputs, tape.gradient(target, sources)

    outputs, gradients = compute(images, upstream)
    left = [variable.value for variable in layer.non_trainable_variables]
    arrays = [tf.cast(tensor, "float64").numpy() for tensor in (outputs, *gradients, *left)]
    graph = compute.get_concrete_function(images, upstream).graph
    return arrays, {operation.type for operation in graph.get_operations()}


def compare(own, theirs, shape, policy):
    """Checks that two layers compute the same from normal numbers; returns their operations."""
    generator = np.random.default_rng(3)
    dtype = keras.DTypePolicy(policy).compute_dtype
    images = tf.constant(generator.normal(2.0, 1.5, shape), dtype)
    own.build(shape)
    theirs.build(shape)
    theirs.set_weights([generator.normal(1.0, 0.3, v.shape) for v in theirs.variables])
    own.set_weights(theirs.get_weights())
    upstream = generator.normal(size=own.compute_output_shape(shape))
    found, of_own = results(own, images, tf.constant(upstream))
    expected, of_theirs = results(theirs, images, tf.constant(upstream))
    for array, reference in zip(found, expected, strict=True):
        assert np.abs(array - reference).max() <= DTYPES[policy] * np.abs(reference).max()
    return of_own, of_theirs


@pytest.mark.parametrize(
    ("shape", "strides", "kernel", "policy"),
    [
        ((3, 4, 4, 6), 1, 3, "float32"),
        ((3, 4, 4, 6), 1, 3, "float64"),
        ((2, 7, 7, 5), 2, 3, "float32"),
        ((2, 7, 7, 5), 2, 3, "mixed_bfloat16"),
        ((2, 4, 3, 2), (2, 1), (3, 2), "float32"),
        ((2, 5, 6, 3), 3, 5, "mixed_bfloat16"),
        ((2, 3, 3, 4), 1, 1, "float32"),
        ((2, 9, 9, 3), 1, 3, "float32"),
    ],
)
def test_a_convolution_is_that_of_keras(shape, strides, kernel, policy):
    arguments = {"strides": strides, "padding": "same", "dtype": policy}
    own, theirs = (make(8, kernel, **arguments) for make in (layers.Conv2D, keras.layers.Conv2D))
    of_own, of_theirs = compare(own, theirs, shape, policy)
    is_small = shape[1] < 8 and kernel != 1 and policy != "float64"
    assert ("MatMul" in of_own) == is_small
    assert ("Conv2D" in of_own) != is_small
    assert "Conv2D" in of_theirs


def test_other_convolutions_are_left_to_keras():
    for arguments in ({"padding": "valid"}, {"dilation_rate": 2}, {"groups": 2}):
        arguments = {"padding": "same", **arguments}
        own, theirs = (make(8, 3, **arguments) for make in (layers.Conv2D, keras.layers.Conv2D))
        of_own, _ = compare(own, theirs, (2, 4, 4, 2), "float32")
        assert "MatMul" not in of_own


@pytest.mark.parametrize("policy", DTYPES)
def test_batch_norm_is_that_of_keras(policy):
    own, theirs = (
        make(momentum=0.7, epsilon=1e-3, dtype=policy)
        for make in (layers.BatchNormalization, keras.layers.BatchNormalization)
    )
    of_own, of_theirs = compare(own, theirs, (4, 5, 3, 7), policy)
    assert ("FusedBatchNormV3" in of_own) == (policy != "float64")
    assert "FusedBatchNormV3" not in of_theirs


def test_synchronized_batch_norm_is_left_to_keras():
    own, theirs = (
        make(synchronized=True)
        for make in (layers.BatchNormalization, keras.layers.BatchNormalization)
    )
    of_own, _ = compare(own, theirs, (4, 5, 3, 7), "float32")
    assert "FusedBatchNormV3" not in of_own


def test_batch_norm_uses_moving_statistics_in_evaluation_and_if_it_is_not_trained():
    images = tf.random.stateless_normal((4, 2, 2, 3), (1, 2))
    own, theirs = layers.BatchNormalization(), keras.layers.BatchNormalization()
    for layer in (own, theirs):
        layer.build(images.shape)
        layer.set_weights([np.arange(1.0, 4.0) + i for i in range(4)])
    assert np.array_equal(own(images, training=False), theirs(images, training=False))
    own.trainable = theirs.trainable = False
    before = own.get_weights()
    assert np.array_equal(own(images, training=True), theirs(images, training=True))
    assert all(map(np.array_equal, before, own.get_weights()))


def test_residual_networks_have_these_layers():
    nested = build_network("resnet18")._flatten_layers()
    kinds = {type(layer) for layer in nested if layer.weights and not hasattr(layer, "layers")}
    assert kinds == {layers.Conv2D, layers.BatchNormalization, keras.layers.Dense}
