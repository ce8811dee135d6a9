"""The private APIs of TensorFlow and Keras: they exist, and do what we rely on."""

import keras
import pytest
import tensorflow as tf

from strategies import tf_private
from tests.conftest import CPUS


def test_optimizer_all_reduce_sum_gradients():
    # Not the default, ring: collectives of two sizes in one process break each other.
    ops = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(CPUS[:2], cross_device_ops=ops)
    with strategy.scope():
        weight = keras.Variable(0.0)
        optimizer = keras.optimizers.SGD(1.0)
        optimizer.build([weight])
    tf_private.disable_optimizer_all_reduce(optimizer)

    @tf.function
    def step():
        strategy.run(lambda: optimizer.apply([tf.constant(1.0)], [weight]))

    step()
    assert float(weight.numpy()) == -1, (
        "keras Optimizer._all_reduce_sum_gradients is not what sums gradients any more"
    )


def test_optimizer_learning_rate():
    schedule = keras.optimizers.schedules.CosineDecay(0.1, 10)
    assert tf_private.learning_rate_schedule(keras.optimizers.SGD(schedule)) is schedule, (
        "keras Optimizer._learning_rate does not hold the schedule"
    )
    assert tf_private.learning_rate_schedule(keras.optimizers.SGD(0.1)) is None


def test_names_of_unnamed_layers():
    names = []
    for _ in range(2):
        tf_private.reset_layer_numbers()
        names.append([keras.layers.Dense(1).name for _ in range(2)])
    assert names == [["dense", "dense_1"]] * 2, "keras naming.reset_uids resets other numbers"


def test_an_attribute_that_is_gone_is_named():
    with pytest.raises(AttributeError, match=r"SGD has no private attribute _gone with Tensor"):
        tf_private.private(keras.optimizers.SGD(), "_gone")
