"""Tests names of unnamed layers, and models that strategies cannot train equally."""

import keras
import numpy as np
import pytest

from app.data.dataset import IMAGE_SHAPE, NUM_CLASSES
from app.data.input_pipeline import train_dataset
from app.runtime.errors import ConfigError
from app.training.recipes import find_recipe
from app.verification.recorder import Recorder
from app.verification.trace import Trace
from app.verification.trace_comparison import compare_traces
from conftest import CPUS
from models import MODELS, load_model_builder
from strategies import load_strategy_class
from strategies.tf_private import reset_layer_numbers


@keras.saving.register_keras_serializable("tests")
class TwoLayers(keras.layers.Layer):
    """A layer made of unnamed layers; adds a loss where asked to."""

    def __init__(self, kernel_initializer, *, adds_loss=False, names=(None, None), **options):
        super().__init__(**options)
        self.adds_loss = adds_loss
        self.hidden, self.logits = (
            keras.layers.Dense(width, kernel_initializer=kernel_initializer, name=name)
            for width, name in zip((8, 10), names, strict=True)
        )

    def call(self, x):
        if self.adds_loss:
            self.add_loss(keras.ops.mean(x))
        return self.logits(self.hidden(x))


def build_unnamed(
    *, image_shape, num_classes, kernel_initializer="glorot_uniform", normalised=False
):
    """Unnamed layers, layers inside a layer, and a model inside a model."""
    images = keras.Input(image_shape)
    x = keras.layers.Conv2D(2, 5, strides=4, kernel_initializer=kernel_initializer)(images)
    x = keras.layers.BatchNormalization()(x) if normalised else x
    x = keras.layers.Flatten()(x)
    x = keras.Sequential([keras.layers.Dense(9, kernel_initializer=kernel_initializer)])(x)
    return keras.Model(images, TwoLayers(kernel_initializer)(x), name="unnamed")


def build_normalised_unnamed(**options):
    return build_unnamed(normalised=True, **options)


def build(network, seed=5):
    return find_recipe("fast", "other").build_model(
        network, image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES, seed=seed
    )


def names(model):
    return [variable.path for variable in model.variables]


def test_keras_still_has_the_private_function_that_numbers_layers():
    reset_layer_numbers()
    assert [keras.layers.Dense(1).name for _ in range(2)] == ["dense", "dense_1"], (
        "keras.src.utils.naming.reset_uids no longer resets the numbers of unnamed layers"
    )
    reset_layer_numbers()
    assert keras.layers.Dense(1).name == "dense"


def test_unnamed_layers_have_the_same_names_each_time():
    first = build(build_unnamed)
    keras.layers.Dense(1)  # Another model of the process.
    second = build(build_unnamed)
    assert names(first) == names(second)
    assert len(set(names(first))) == len(names(first)) == 8


def test_weights_do_not_depend_on_the_numbers_of_layers():
    keras.utils.set_random_seed(5)
    initializer = find_recipe("fast", "other").kernel_initializer
    network = build_unnamed(
        image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES, kernel_initializer=initializer
    )
    for _ in range(2):
        model = build(build_unnamed)
        for expected, variable in zip(network.variables, model.variables, strict=True):
            np.testing.assert_array_equal(expected.numpy(), variable.numpy())


@pytest.mark.parametrize(
    "network", [pytest.param(build_unnamed, marks=pytest.mark.slow), build_normalised_unnamed]
)
def test_manual_and_mirrored_train_unnamed_layers_bit_for_bit(tmp_path, images, network):
    recipe = find_recipe("fast", "other")
    for name in ("manual", "mirrored"):
        strategy = load_strategy_class(name)(CPUS[:3])
        strategy.build(lambda: build(network), lambda: recipe.create_optimizer(0.1, 10))
        batches = strategy.distribute(train_dataset(*images, seed=1, global_batch_size=16))
        Recorder(strategy).record(batches, num_steps=2, path=tmp_path / f"{name}")
    with Trace(tmp_path / "manual") as manual, Trace(tmp_path / "mirrored") as mirrored:
        assert len(manual.tensors(2, "weights")) == (10 if "norm" in network.__name__ else 8)
        differences = compare_traces(manual, mirrored)
    assert differences and all(difference.identical for difference in differences)


def with_layer(layer):
    """Returns the builder of a model with this layer, built again each time, in a nested model."""

    def build_network(*, image_shape, num_classes, kernel_initializer="glorot_uniform"):
        images = keras.Input(image_shape)
        inner = keras.Sequential([keras.Input((784,)), layer(kernel_initializer)], name="inner")
        return keras.Model(images, inner(keras.layers.Flatten()(images)), name="adding")

    return build_network


def dense(**options):
    return with_layer(
        lambda kernel_initializer: keras.layers.Dense(
            10, kernel_initializer=kernel_initializer, name="penalised", **options
        )
    )


@pytest.mark.parametrize(
    "network",
    [
        dense(kernel_regularizer="l2"),
        dense(bias_regularizer="l1"),
        dense(activity_regularizer="l2"),
        with_layer(lambda initializer: TwoLayers(initializer, adds_loss=True, name="penalised")),
    ],
)
def test_a_model_that_adds_losses_is_refused(network):
    with pytest.raises(ConfigError, match="model adding: layer penalised adds a loss") as refusal:
        build(network)
    assert refusal.value.exit_code == 2 and "\n" not in str(refusal.value)


def test_two_variables_of_one_name_are_refused():
    network = with_layer(lambda initializer: TwoLayers(initializer, names=("a", "a"), name="two"))
    with pytest.raises(
        ConfigError, match="2 variables are named inner/two/a/kernel; give each layer"
    ):
        build(network)


@pytest.mark.parametrize("name", [*MODELS, "unnamed"])
def test_the_check_of_a_model_changes_nothing(name, monkeypatch):
    network = build_normalised_unnamed if name == "unnamed" else load_model_builder(name)
    checked = build(network)
    monkeypatch.setattr("app.training.recipes.check_model", lambda model: None)
    unchecked = build(network)
    assert names(checked) == names(unchecked)
    for a, b in zip(checked.variables, unchecked.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
