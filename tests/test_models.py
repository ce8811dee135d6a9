"""Architectures: shapes and exact parameter counts."""

import keras
import numpy as np
import pytest

from app.data.dataset import IMAGE_SHAPE, NUM_CLASSES
from app.runtime.errors import ConfigError
from app.training.recipes import RECIPES, find_recipe
from dense_network import build_dense_network
from models import MODELS, load_model_builder
from models.resnet import build_resnet
from small_models import build_network
from strategies.flops import forward_flops, product_layers

TRAINABLE = {"lenet": 129_068, "resnet9": 648_234, "resnet18": 11_175_818}


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
    assert not model.compiled


@pytest.mark.parametrize("name", MODELS)
def test_shapes_follow_from_what_the_builder_gets(name):
    model = load_model_builder(name)(image_shape=(32, 24, 3), num_classes=7)
    assert model.input_shape == (None, 32, 24, 3)
    assert model.output_shape == (None, 7)


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
    assert refusal.value.exit_code == 2
    assert named in str(refusal.value) and "\n" not in str(refusal.value)
    required = (None, *IMAGE_SHAPE) if "image_shape" in own else (None, NUM_CLASSES)
    assert f"requires {required}" in str(refusal.value)


def test_dimensions_that_a_model_leaves_open_fit_any_data_set():
    def builder(*, image_shape, num_classes, kernel_initializer):
        images = keras.Input((None, None, image_shape[-1]))
        pooled = keras.layers.GlobalAveragePooling2D()(images)
        return keras.Model(images, keras.layers.Dense(num_classes)(pooled), name="open")

    model = find_recipe("d2l", "other").build_model(builder, **SHAPES, seed=0)
    assert model.input_shape == (None, *IMAGE_SHAPE)


def test_resnet18_keeps_the_image_size_in_the_stem_and_halves_it_thrice():
    model = build_network("resnet18")
    assert model.get_layer("stem_conv").output.shape == (None, 28, 28, 64)
    assert model.get_layer("stage3_block1_conv2").output.shape == (None, 4, 4, 512)
    assert not any(isinstance(layer, keras.layers.MaxPooling2D) for layer in model.layers)
    assert all(layer.use_bias for layer in model.layers if isinstance(layer, keras.layers.Conv2D))


def test_flops_of_lenet():
    flops = sum(map(forward_flops, product_layers(build_network("lenet"))))
    assert flops == 2 * (121_680 + 2_025_000 + 102_400 + 1_280)


def test_resnet9_has_nine_layers_of_weights_and_halves_the_image_thrice():
    model = build_network("resnet9")
    weighted = [x for x in model.layers if isinstance(x, keras.layers.Conv2D | keras.layers.Dense)]
    assert len(weighted) == 9
    assert model.get_layer("stem_norm").output.shape == (None, 14, 14, 32)
    assert model.get_layer("stage1_block2_conv").output.shape == (None, 7, 7, 96)
    assert model.get_layer("stage2_block2_conv").output.shape == (None, 3, 3, 128)
    flops = sum(map(forward_flops, product_layers(model)))
    assert flops == pytest.approx(2 * 30.9e6, rel=0.02)


def test_small_resnets_come_from_the_same_function():
    model = build_resnet(
        name="tiny", image_shape=(8, 8, 1), num_classes=10, stage_widths=(2, 4), blocks_per_stage=1
    )
    # Stem 20 + 4; two blocks of two 3 × 3 convolutions with norms; a shortcut; the last layer.
    blocks = 2 * (38 + 4), (76 + 8) + (148 + 8) + 12
    assert count(model.trainable_variables) == 24 + sum(blocks) + 50


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_initial_weights_follow_from_the_seed(name, recipe):
    first, again, other = (build(recipe, name, seed) for seed in (5, 5, 6))
    pairs = list(zip(first.variables, again.variables, other.variables, strict=True))
    assert all(np.array_equal(a, b) for a, b, _ in pairs)
    kernels = [(a, c) for a, _, c in pairs if a.path.endswith("kernel")]
    assert all(not np.array_equal(a, c) for a, c in kernels)
    assert all(np.all(a == 0) for a, _, _ in pairs if a.path.endswith("bias"))


def test_layers_of_one_shape_start_from_different_numbers():
    model = build("d2l", "resnet18")
    kernels = [v.numpy() for v in model.trainable_variables if v.shape == (3, 3, 64, 64)]
    assert len(kernels) == 4
    assert len({kernel.tobytes() for kernel in kernels}) == 4


def test_d2l_initial_weights():
    model = build("d2l", "lenet")
    kernel = next(v for v in model.variables if v.path.endswith("hidden/kernel")).numpy()
    assert abs(kernel.mean()) < 1e-4 and abs(kernel.std() - 0.01) < 1e-4
