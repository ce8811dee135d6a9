"""Architectures: shapes, exact parameter counts, names; models that are refused."""

import keras
import numpy as np
import pytest

from app.data.fashion_mnist import IMAGE_SHAPE, NUM_CLASSES
from app.errors import ConfigError
from app.training.recipes import find_recipe
from models import MODELS, load_model_builder
from models.resnet import build_resnet
from tests.dense_network import build_dense_network
from tests.small_models import build_network
from tests.strategies.walks import assert_same_bits, training, walk

TRAINABLE = {"lenet": 129_068, "resnet18": 11_175_818}
OUTPUTS = {
    "lenet": {},
    "resnet18": {"stem_conv": (28, 28, 64), "stage3_block1_conv2": (4, 4, 512)},
}
SHAPES = {"image_shape": IMAGE_SHAPE, "num_classes": NUM_CLASSES}


def build(recipe, name, seed=0):
    return find_recipe(recipe, name).build_model(load_model_builder(name), **SHAPES, seed=seed)


def count(variables):
    return sum(int(np.prod(variable.shape)) for variable in variables)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_parameters(name):
    model = build_network(name)
    assert model.input_shape == (None, 28, 28, 1)
    assert model.output_shape == (None, 10)
    assert count(model.trainable_variables) == TRAINABLE[name]
    other = load_model_builder(name)(image_shape=(32, 24, 3), num_classes=7)
    assert (other.input_shape, other.output_shape) == ((None, 32, 24, 3), (None, 7))
    for layer, shape in OUTPUTS[name].items():
        assert model.get_layer(layer).output.shape == (None, *shape)


def test_a_residual_block_ends_with_a_relu():
    network = build_resnet(
        name="two_blocks", image_shape=(8, 8, 1), num_classes=10, stage_widths=(4, 8),
        blocks_per_stage=1,
    )  # fmt: skip
    pools = keras.layers.GlobalAveragePooling2D
    (pool,) = (layer for layer in network.layers if isinstance(layer, pools))
    images = np.random.default_rng(0).normal(size=(4, 8, 8, 1))
    assert np.min(keras.Model(network.input, pool.input)(images)) == 0


@pytest.mark.parametrize(
    ("own", "named"),
    [
        ({"image_shape": (32, 32, 3)}, "input shape is (None, 32, 32, 3), "),
        ({"num_classes": 100}, "output shape is (None, 100), "),
    ],
)
def test_a_model_that_does_not_fit_the_data_set_is_refused(own, named):
    def builder(**arguments):
        return build_dense_network(**{**arguments, **own})

    with pytest.raises(ConfigError, match=r"^model dense: ") as refusal:
        find_recipe("d2l", "other").build_model(builder, **SHAPES, seed=0)
    assert named in str(refusal.value)
    required = (None, *IMAGE_SHAPE) if "image_shape" in own else (None, NUM_CLASSES)
    assert f"requires {required}" in str(refusal.value)


def test_dimensions_that_a_model_leaves_open_fit_any_data_set():
    def builder(*, image_shape, num_classes, kernel_initializer):
        images = keras.Input((None, None, image_shape[-1]))
        pooled = keras.layers.GlobalAveragePooling2D()(images)
        return keras.Model(images, keras.layers.Dense(num_classes)(pooled), name="open")

    model = find_recipe("d2l", "other").build_model(builder, **SHAPES, seed=0)
    assert model.input_shape == (None, *IMAGE_SHAPE)


@pytest.mark.parametrize(("recipe", "name"), [("d2l", "lenet"), ("fast", "resnet18")])
def test_initial_weights_follow_from_the_seed(recipe, name):
    first, again, other = (build(recipe, name, seed) for seed in (5, 5, 6))
    pairs = list(zip(first.variables, again.variables, other.variables, strict=True))
    assert all(np.array_equal(a, b) for a, b, _ in pairs)
    kernels = [(a, c) for a, _, c in pairs if a.path.endswith("kernel")]
    assert all(not np.array_equal(a, c) for a, c in kernels)
    assert all(np.all(a == 0) for a, _, _ in pairs if a.path.endswith("bias"))
    if recipe == "d2l":
        values = np.concatenate([a.numpy().ravel() for a, _ in kernels])
        assert abs(values.mean()) < 1e-4 and abs(values.std() - 0.01) < 1e-4
    # Layers of one shape start from different numbers.
    values = [variable.numpy().tobytes() for variable, _ in kernels]
    assert len({*values}) == len(values)


# Names of unnamed layers, and models that strategies cannot train equally.


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


def build_unnamed(*, image_shape, num_classes, kernel_initializer="glorot_uniform"):
    """Unnamed layers, layers inside a layer, and a model inside a model."""
    images = keras.Input(image_shape)
    x = keras.layers.Conv2D(2, 5, strides=4, kernel_initializer=kernel_initializer)(images)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Flatten()(x)
    x = keras.Sequential([keras.layers.Dense(9, kernel_initializer=kernel_initializer)])(x)
    return keras.Model(images, TwoLayers(kernel_initializer)(x), name="unnamed")


def checked(network):
    return find_recipe("fast", "other").build_model(network, **SHAPES, seed=5)


def unnamed_model():
    return checked(build_unnamed)


def names(model):
    return [variable.path for variable in model.variables]


def test_names_and_weights_do_not_depend_on_the_numbers_of_layers():
    keras.utils.set_random_seed(5)
    initializer = find_recipe("fast", "other").kernel_initializer
    network = build_unnamed(**SHAPES, kernel_initializer=initializer)
    first = unnamed_model()
    keras.layers.Dense(1)  # Another model of the process.
    second = unnamed_model()
    assert names(first) == names(second)
    assert len(set(names(first))) == len(names(first)) == 12
    for model in (first, second):
        for expected, variable in zip(network.variables, model.variables, strict=True):
            np.testing.assert_array_equal(expected.numpy(), variable.numpy())


@pytest.mark.parity
def test_manual_and_mirrored_train_unnamed_layers_bit_for_bit():
    manual, mirrored = (walk(training(name, 2, unnamed_model)) for name in ("manual", "mirrored"))
    assert len(manual.states[-1]) == 14  # 8 weights, 4 of the normalisation, 2 of the optimizer.
    for state, expected in zip(manual.states, mirrored.states, strict=True):
        assert_same_bits(state, expected)


def with_layer(layer):
    """Returns the builder of a model with this layer, built again each time, in a nested model."""

    def build_network(*, image_shape, num_classes, kernel_initializer="glorot_uniform"):
        images = keras.Input(image_shape)
        inner = keras.Sequential([keras.Input((784,)), layer(kernel_initializer)], name="inner")
        return keras.Model(images, inner(keras.layers.Flatten()(images)), name="adding")

    return build_network


def dense(**options):
    return with_layer(
        lambda initializer: keras.layers.Dense(
            10, kernel_initializer=initializer, name="penalised", **options
        )
    )


ADDS = "model adding: layer penalised adds a loss"


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (dense(kernel_regularizer="l2"), ADDS), (dense(activity_regularizer="l2"), ADDS),
        (with_layer(lambda given: TwoLayers(given, adds_loss=True, name="penalised")), ADDS),
        (with_layer(lambda given: TwoLayers(given, names=("a", "a"), name="two")),
         "2 variables are named inner/two/a/kernel; give each layer"),
    ],
)  # fmt: skip
def test_a_model_that_strategies_cannot_train_equally_is_refused(network, told):
    with pytest.raises(ConfigError, match=told) as refusal:
        checked(network)
    assert refusal.value.exit_code == 2 and "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["lenet", "unnamed"])
def test_the_check_of_a_model_changes_nothing(name, monkeypatch):
    network = build_unnamed if name == "unnamed" else load_model_builder(name)
    first = checked(network)
    monkeypatch.setattr("app.training.recipes.check_model", lambda model: None)
    second = checked(network)
    assert names(first) == names(second)
    for a, b in zip(first.variables, second.variables, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
