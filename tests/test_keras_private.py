"""Tests the private Keras APIs for compiled models: they exist and behave as expected."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from conftest import CPUS
from strategies import keras_private
from strategies.tf_private import local_replica_id

BATCH = tf.ones((1, 3)), tf.ones((1, 1))


def compiled(*layers: keras.layers.Layer, **options) -> keras.Model:
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("adam", "mse", metrics=["mae"], **options)
    return model


def test_all_variables_of_a_compiled_model_are_created():
    model = compiled()
    assert not model.variables
    keras_private.build_compiled(model, BATCH)
    assert len(model.variables) == 2
    assert len(model.optimizer.variables) == 2 + 2 * 2  # Iterations, rate, two moments each.
    assert any("mae" in v.path or "total" in v.path for v in model.metrics_variables)


def test_loss_of_a_compiled_model_holds_what_layers_add():
    model = compiled(keras.layers.Dense(2, kernel_regularizer=keras.regularizers.L2(0.5)))
    keras_private.build_compiled(model, BATCH)
    x, y = BATCH
    y_pred = model(x)
    loss = keras_private.compiled_loss(model, x, y, y_pred, None, training=True)
    added = 0.5 * np.sum(np.square(model.layers[0].kernel))
    np.testing.assert_allclose(loss, np.mean(np.square(y_pred - y)) + added, rtol=1e-6)


def test_model_without_a_loss_has_loss_0():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd")
    keras_private.build_compiled(model, BATCH)
    x, y = BATCH
    assert keras_private.compiled_loss(model, x, y, model(x), None, training=True) == 0


def test_whether_a_model_takes_training():
    class Plain(keras.Model):
        def call(self, x):
            return x

    assert not keras_private.takes_training(Plain())
    assert keras_private.takes_training(compiled())


def test_seeds_are_told_from_other_variables():
    model = compiled(keras.layers.Dropout(0.5), keras.layers.BatchNormalization())
    keras_private.build_compiled(model, BATCH)
    seeds = [v.path for v in model.variables if keras_private.is_seed(model, v)]
    assert len(seeds) == 1 and "seed" in seeds[0]


def test_masks_are_attached_to_tensors():
    masked = keras.layers.Embedding(4, 2, mask_zero=True)(tf.constant([[1, 0]]))
    assert keras_private.get_mask(masked).numpy().tolist() == [[True, False]]
    other = tf.identity(masked)
    assert keras_private.get_mask(other) is None
    keras_private.set_mask(other, tf.constant([[False, True]]))
    assert keras_private.get_mask(other).numpy().tolist() == [[False, True]]


def test_optimizer_within_a_loss_scale():
    inner = keras.optimizers.SGD()
    assert keras_private.inner_optimizer(keras.optimizers.LossScaleOptimizer(inner)) is inner
    assert keras_private.inner_optimizer(inner) is inner


@pytest.mark.parametrize("synchronized", [False, True])
def test_synchronized_layers_inside_others_are_found(synchronized):
    inner = keras.Sequential([keras.layers.BatchNormalization(synchronized=synchronized)])
    assert keras_private.is_synchronized(inner) == synchronized


def test_stored_value_is_not_that_of_a_scope():
    variable = keras.Variable(1.0)
    with keras.StatelessScope([(variable, tf.constant(2.0))]):
        assert float(variable) == 2
        assert float(keras_private.stored_value(variable)) == 1


def test_replica_of_this_worker():
    ops = tf.distribute.ReductionToOneDevice()
    strategy = tf.distribute.MirroredStrategy(CPUS[:2], cross_device_ops=ops)
    numbers = []
    strategy.run(lambda: numbers.append(local_replica_id()))
    assert numbers == [0, 1] and local_replica_id() == 0
    with strategy.scope():
        assert local_replica_id() == 0  # Outside of a replica.
