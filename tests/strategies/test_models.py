"""Models: shapes, exact parameter counts, names, own layers; models that are refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.data.fashion_mnist import IMAGE_SHAPE
from app.errors import ConfigError
from app.training.recipes import find_recipe
from models import MODELS, layers, load_model_builder
from models.resnet import build_resnet
from tests.dense_network import build_dense_network
from tests.small_models import SHAPES, build_network

TRAINABLE = {"lenet": 129_068, "resnet18": 11_175_818}
OUTPUTS = {"resnet18": {"stem_conv": (28, 28, 64), "stage3_block1_conv2": (4, 4, 512)}}


def build(builder, recipe="fast", name="other", seed=5):
    return find_recipe(recipe, name).build_model(builder, **SHAPES, seed=seed)


@pytest.mark.parametrize("name", MODELS)
def test_shapes_and_parameters(name):
    model = build_network(name)
    assert (model.input_shape, model.output_shape) == ((None, 28, 28, 1), (None, 10))
    assert sum(np.prod(v.shape) for v in model.trainable_variables) == TRAINABLE[name]
    other = load_model_builder(name)(image_shape=(32, 24, 3), num_classes=7)
    assert (other.input_shape, other.output_shape) == ((None, 32, 24, 3), (None, 7))
    for layer, shape in OUTPUTS.get(name, {}).items():
        assert model.get_layer(layer).output.shape == (None, *shape)
    if name == "resnet18":  # A block ends with a ReLU, also the last one.
        assert isinstance(model.layers[-3], keras.layers.ReLU)


def build_one_block(**options):
    return build_resnet(name="one", stage_widths=(4,), blocks_per_stage=1, **options)


@pytest.mark.parametrize(
    ("recipe", "name", "builder"),
    [("d2l", "lenet", load_model_builder("lenet")), ("fast", "resnet18", build_one_block)],
)
def test_initial_weights_follow_from_the_seed(recipe, name, builder):
    first, again, other = (build(builder, recipe, name, seed).variables for seed in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    pairs = [(a, b) for a, b in zip(first, other, strict=True) if a.path.endswith("kernel")]
    assert all(not np.array_equal(a, b) for a, b in pairs)
    assert all(np.all(v == 0) for v in first if v.path.endswith("bias"))
    if recipe == "d2l":
        values = np.concatenate([a.numpy().ravel() for a, _ in pairs])
        assert abs(values.mean()) < 1e-4 and abs(values.std() - 0.01) < 1e-4
    # Layers of one shape start from different numbers.
    assert len({kernel.numpy().tobytes() for kernel, _ in pairs}) == len(pairs)


# The two layers that are written again: results and gradients are those of Keras.

# Policy → largest distance, relative to the largest number: roundings of the policy's numbers.
DTYPES = {"float32": 2e-6, "mixed_bfloat16": 2e-2, "float64": 1e-14}


def results(layer, images, upstream):
    """Returns what a layer computes in training and then without, and its operations there."""

    @tf.function(autograph=False)
    def compute(images, upstream):
        with tf.GradientTape() as tape:
            tape.watch(images)
            outputs = layer(images, training=True)
            target = tf.reduce_sum(outputs * tf.cast(upstream, outputs.dtype))
        sources = [images, *(variable.value for variable in layer.trainable_variables)]
        return outputs, tape.gradient(target, sources)

    outputs, gradients = compute(images, upstream)
    left = [layer(images, training=False), *(v.value for v in layer.non_trainable_variables)]
    arrays = [tf.cast(tensor, "float64").numpy() for tensor in (outputs, *gradients, *left)]
    graph = compute.get_concrete_function(images, upstream).graph
    return arrays, {operation.type for operation in graph.get_operations()}


def compare(name, shape, *arguments, dtype="float32", **options):
    """Checks that a layer computes what Keras' does; returns the operations of both."""
    generator = np.random.default_rng(3)
    own, theirs = (
        getattr(module, name)(*arguments, dtype=dtype, **options)
        for module in (layers, keras.layers)
    )
    images = generator.normal(2.0, 1.5, shape)
    own.build(shape)
    theirs.build(shape)
    theirs.set_weights([generator.normal(1.0, 0.3, v.shape) for v in theirs.variables])
    own.set_weights(theirs.get_weights())
    upstream = generator.normal(size=own.compute_output_shape(shape))
    given = tf.constant(images, keras.DTypePolicy(dtype).compute_dtype), tf.constant(upstream)
    (found, of_own), (expected, of_theirs) = results(own, *given), results(theirs, *given)
    for array, reference in zip(found, expected, strict=True):
        assert np.abs(array - reference).max() <= DTYPES[dtype] * np.abs(reference).max()
    return of_own, of_theirs


@pytest.mark.parametrize(
    ("shape", "kernel", "options", "is_product"),
    [
        ((3, 4, 4, 6), 3, {}, True),
        ((3, 4, 4, 6), 3, {"dtype": "float64"}, False),
        ((2, 7, 7, 5), 3, {"strides": 2, "dtype": "mixed_bfloat16"}, True),
        ((2, 4, 3, 2), (3, 2), {"strides": (2, 1)}, True),
        ((2, 3, 3, 4), 1, {}, False),
        ((2, 9, 9, 3), 3, {}, False),
        ((2, 4, 4, 2), 3, {"padding": "valid"}, False),
        ((2, 4, 4, 2), 3, {"dilation_rate": 2}, False),
        ((2, 4, 4, 2), 3, {"groups": 2}, False),
    ],
)
def test_a_convolution_is_that_of_keras_and_of_small_images_a_product(
    shape, kernel, options, is_product
):
    of_own, _ = compare("Conv2D", shape, 8, kernel, **{"padding": "same", **options})
    assert ("MatMul" in of_own) == is_product


@pytest.mark.parametrize(
    ("options", "is_fused"),
    [
        ({}, True), ({"dtype": "mixed_bfloat16"}, True), ({"dtype": "float64"}, False),
        ({"synchronized": True}, False), ({"trainable": False}, False),
    ],
)  # fmt: skip
def test_batch_norm_is_that_of_keras(options, is_fused):
    of_own, of_theirs = compare(
        "BatchNormalization", (4, 5, 3, 7), momentum=0.7, epsilon=1e-3, **options
    )
    assert ("FusedBatchNormV3" in of_own) == is_fused and "FusedBatchNormV3" not in of_theirs


# Models of one's own: unnamed layers, and what is refused.


@keras.saving.register_keras_serializable("tests")
class TwoLayers(keras.layers.Layer):
    """A layer made of layers, unnamed by default."""

    def __init__(self, kernel_initializer, *, names=(None, None), **options):
        super().__init__(**options)
        self.hidden, self.logits = (
            keras.layers.Dense(width, kernel_initializer=kernel_initializer, name=name)
            for width, name in zip((8, 10), names, strict=True)
        )

    def call(self, x):
        return self.logits(self.hidden(x))


def build_unnamed(*, image_shape, num_classes, kernel_initializer="glorot_uniform"):
    """Unnamed layers, layers inside a layer, and a model inside a model."""
    images = keras.Input((None, None, image_shape[-1]))  # Open dimensions fit any data set.
    x = keras.layers.Conv2D(2, 5, strides=4, kernel_initializer=kernel_initializer)(images)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.GlobalAveragePooling2D()(x)
    x = keras.Sequential([keras.layers.Dense(9, kernel_initializer=kernel_initializer)])(x)
    return keras.Model(images, TwoLayers(kernel_initializer)(x), name="unnamed")


def test_names_and_weights_do_not_depend_on_the_numbers_of_layers():
    keras.utils.set_random_seed(5)
    initializer = find_recipe("fast", "other").kernel_initializer
    network = build_unnamed(**SHAPES, kernel_initializer=initializer)  # Checked by nothing.
    first = build(build_unnamed)
    keras.layers.Dense(1)  # Another model of the process.
    second = build(build_unnamed)
    paths = [variable.path for variable in first.variables]
    assert paths == [variable.path for variable in second.variables]
    assert len(set(paths)) == len(paths) == 12
    for model in (first, second):
        assert model.input_shape == (None, *IMAGE_SHAPE)
        assert all(map(np.array_equal, network.get_weights(), model.get_weights()))


def with_layer(layer):
    """Returns the builder of a model with this layer, built again each time, in a nested model."""

    def build_network(*, image_shape, num_classes, kernel_initializer="glorot_uniform"):
        images = keras.Input(image_shape)
        inner = keras.Sequential([keras.Input((784,)), layer(kernel_initializer)], name="inner")
        return keras.Model(images, inner(keras.layers.Flatten()(images)), name="adding")

    return build_network


def other_shape(**other):
    return lambda **given: build_dense_network(**{**given, **other})


@pytest.mark.parametrize(
    ("network", "told"),
    [
        (with_layer(lambda _: keras.layers.Dense(10, activity_regularizer="l2", name="penalised")),
         "model adding: layer penalised adds a loss"),
        (with_layer(lambda initializer: TwoLayers(initializer, names=("a", "a"), name="two")),
         "model adding: 2 variables are named inner/two/a/kernel; give each layer"),
        (other_shape(image_shape=(32, 32, 3)),
         r"model dense: .* \(None, 32, 32, 3\), .* requires \(None, 28, 28, 1\)"),
        (other_shape(num_classes=100), r"model dense: .* \(None, 100\), .* requires \(None, 10\)"),
    ],
)  # fmt: skip
def test_a_model_that_strategies_cannot_train_equally_is_refused(network, told):
    with pytest.raises(ConfigError, match=f"^{told}") as refusal:
        build(network)
    assert refusal.value.exit_code == 2 and "\n" not in str(refusal.value)
