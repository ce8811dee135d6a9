"""Tensor parallelism: which channels each device computes, its tape, variables in parts."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conftest import CPUS
from placement import devices_of_products, devices_of_variables, step_graph
from small_models import build_network, create, deep_network, deep_norm_network
from strategies.channel_parts import split_calls
from strategies.device_tape import DeviceTape, Spread
from strategies.layer_calls import LayerCalls
from strategies.observer import Observer
from strategies.split_variable import RepeatedVariable, SplitVariable
from walks import assert_same_bits, batches, training, walk

# What cannot be split.


def test_first_gradients_of_a_part_are_those_of_one_device():
    """The sum in the backward pass of a gather: without it they are 80 to 100 % wrong."""
    single, tensor = (walk(training(name, n)).states for name, n in [("single", 1), ("tensor", 3)])
    assert_same_bits(tensor[0], single[0])
    for name in [name for name in single[0] if name.startswith("model/")]:
        expected, found = (states[1][name] - states[0][name] for states in (single, tensor))
        scale = np.linalg.norm(expected)
        assert scale > 0 and np.linalg.norm(found - expected) < 1e-5 * scale, name


def test_more_devices_than_channels_are_refused():
    with pytest.raises(
        ValueError, match=r"layer stem_conv \(Conv2D\) has 3 channels, too few for 4 devices"
    ):
        create("tensor", 4, lambda: network(keras.layers.Conv2D(3, 3, name="stem_conv")))


def network(*layers):
    return keras.Sequential(
        [
            keras.Input((28, 28, 1), dtype="uint8"), keras.layers.Rescaling(1 / 255), *layers,
            keras.layers.Flatten(), keras.layers.Dense(10),
        ],
    )  # fmt: skip


@pytest.mark.parametrize(
    "layers",
    [
        [keras.layers.LayerNormalization(name="odd")],
        [keras.layers.Dropout(0.5, name="odd")],
        [keras.layers.Conv2D(4, 3), keras.layers.Conv2D(4, 3, groups=2, name="odd")],
        [keras.layers.Conv2D(4, 3), keras.layers.BatchNormalization(axis=1, name="odd")],
        [keras.layers.Flatten(), keras.layers.BatchNormalization(name="odd")],
        [keras.layers.Conv2D(4, 3, activation="softmax", name="odd")],
        [keras.layers.Conv2D(4, 3), keras.layers.Activation("softmax", name="odd")],
    ],
    ids=["norm", "dropout", "groups", "axis", "whole", "softmax", "softmax layer"],
)
def test_layers_that_cannot_be_split_are_refused(layers):
    with pytest.raises(ValueError, match=r"layer odd .*cannot be split"):
        create("tensor", 2, lambda: network(*layers))


# Parts.


def test_parts_make_up_the_layers():
    model = build_network("lenet")
    for split in split_calls(LayerCalls.of(model), CPUS[:4]):
        for whole, *parts in zip(
            split.call.layer.variables, *(layer.variables for layer in split.layers), strict=True
        ):
            joined = np.concatenate([part.numpy() for part in parts], axis=-1)
            np.testing.assert_array_equal(joined, whole.numpy())
            sizes = [part.shape[-1] for part in parts]
            assert max(sizes) - min(sizes) <= 1
            assert [devices_of_variables([part]) for part in parts] == [{name} for name in CPUS]


def test_every_variable_is_on_the_device_of_its_part():
    strategy = create("tensor", 4, deep_norm_network, model_parallel=2)
    for r, row in enumerate(strategy.rows):
        for d, optimizer in enumerate(row.optimizers):
            own = [
                *row.variables(d, trainable=True).values(),
                *row.variables(d, trainable=False).values(),
                *optimizer.variables,
            ]
            assert devices_of_variables(own) == {CPUS[2 * r + d]}


def test_a_part_is_computed_on_its_device_and_no_more_than_a_part():
    strategy = create("tensor", 3, deep_network)
    graph = step_graph(strategy, batches(strategy))
    found, devices = devices_of_products(graph), CPUS[:3]
    assert found["Conv2D"] == found["Conv2DBackpropFilter"] == dict.fromkeys(devices, 1)
    # Two dense layers: forwards, backwards by input and by weights.
    assert found["MatMul"] == dict.fromkeys(devices, 6)
    filters = [op.inputs[1].shape[-1] for op in graph.get_operations() if op.type == "Conv2D"]
    assert sorted(filters) == [1, 2, 2]


# The tape.


def test_the_backward_pass_of_a_gather_is_a_sum_over_the_devices():
    """y_d = w_d · sum(x_0, x_1, x_2), so x gets the sum of all w: whole numbers, exactly."""
    devices, x = CPUS[:3], [1.0, 2.0, 4.0]
    weights = [tf.constant(10.0), tf.constant(100.0), tf.constant(1000.0)]
    seen = []

    class Watcher(Observer):
        def on_pieces(self, device_id, pieces):
            seen.append((device_id, [float(piece[0]) for piece in pieces]))
            return pieces

    tape = DeviceTape(devices, Watcher())
    factors = [[tf.constant(1.0)] for _ in devices]
    start = tape.each(
        lambda d, value: value * factors[d][0], [Spread(tf.constant([v]) for v in x)], factors
    )
    whole = tape.gather(start, [1, 1, 1])
    out = tape.each(lambda d, value: weights[d] * tf.reduce_sum(value), [whole])
    assert [float(v) for v in out.tensors] == [70.0, 700.0, 7000.0]
    gradients = tape.gradient(out, [tf.constant(1.0)] * 3, factors)
    # d(sum of y) / d(factor d) = (10 + 100 + 1000) · x_d.
    assert [float(g) for (g,) in gradients] == [1110.0, 2220.0, 4440.0]
    assert seen == [(d, [10.0, 100.0, 1000.0]) for d in range(3)]


def test_gradients_of_a_value_that_is_used_twice_are_added():
    tape, factors = DeviceTape(CPUS[:2], Observer()), [[tf.constant(3.0)], [tf.constant(5.0)]]
    x = tape.each(lambda d, v: v * factors[d][0], [Spread([tf.constant(1.0)] * 2)], factors)
    square = tape.each(lambda d, a: a * a, [x])
    total = tape.each(lambda d, a, b: a + b, [x, square])
    gradients = tape.gradient(total, [tf.constant(1.0)] * 2, factors)
    assert [float(g) for (g,) in gradients] == [7.0, 11.0]  # 1 + 2 w.


def test_a_value_that_one_function_takes_twice_has_one_gradient():
    tape, factors = DeviceTape(CPUS[:2], Observer()), [[tf.constant(3.0)], [tf.constant(5.0)]]
    x = tape.each(lambda d, v: v * factors[d][0], [Spread([tf.constant(1.0)] * 2)], factors)
    total = tape.each(lambda d, a, b: a + b, [x, x])
    gradients = tape.gradient(total, [tf.constant(1.0)] * 2, factors)
    assert [float(g) for (g,) in gradients] == [2.0, 2.0]


# Variables of which several devices have a part.


def on(devices, arrays):
    variables = []
    for device, array in zip(devices, arrays, strict=True):
        with tf.device(device):
            variables.append(tf.Variable(array))
    return variables


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_a_split_variable_is_the_whole(axis):
    whole = np.arange(30, dtype=np.float32).reshape(5, 6)
    parts = on(CPUS[:3], np.array_split(whole, 3, axis))
    variable = SplitVariable(parts, axis)
    assert (variable.shape, variable.dtype) == (tf.TensorShape([5, 6]), tf.float32)
    np.testing.assert_array_equal(variable.numpy(), whole)
    variable.assign(-whole)
    np.testing.assert_array_equal(variable.numpy(), -whole)
    assert [p.shape[axis] for p in variable.parts] == [p.shape[axis] for p in parts]


def test_a_variable_in_ranges_of_its_elements_has_its_shape():
    whole = np.arange(30, dtype=np.float32).reshape(5, 6)
    variable = SplitVariable(on(CPUS, np.array_split(whole.ravel(), 4)), 0, (5, 6))
    assert variable.shape == tf.TensorShape([5, 6])
    np.testing.assert_array_equal(variable.numpy(), whole)
    variable.assign(whole + 1)
    assert variable.parts[0].numpy().tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    with pytest.raises(ValueError):
        variable.assign(whole[1:])


def test_a_part_without_elements():
    """Of 2 elements over 3 devices one has none."""
    variable = SplitVariable(on(CPUS[:3], np.array_split(np.float32([1, 2]), 3)), 0, (2,))
    variable.assign(np.float32([3, 4]))
    assert variable.numpy().tolist() == [3, 4]
    assert [part.shape[0] for part in variable.parts] == [1, 1, 0]


def test_a_repeated_variable_is_assigned_everywhere():
    variable = RepeatedVariable(on(CPUS[:3], [np.int64(1)] * 3))
    assert (variable.shape, variable.dtype) == (tf.TensorShape([]), tf.int64)
    variable.assign(np.int64(5))
    assert [int(copy) for copy in variable.copies] == [5, 5, 5]
    assert variable.numpy() == 5
