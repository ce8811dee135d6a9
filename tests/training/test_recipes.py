"""Recipes: learning rates, schedules, input scaling."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.data.fashion_mnist import IMAGE_SHAPE, NUM_CLASSES
from app.training.recipes import RECIPES, find_recipe, last_learning_rate
from models import load_model_builder
from strategies.tf_private import learning_rate_schedule


def rates_of(recipe, peak, num_steps):
    """Returns the rate of each step, computed by one function of TensorFlow."""
    schedule = learning_rate_schedule(recipe.create_optimizer(peak, num_steps))
    compute = tf.function(lambda steps: tf.map_fn(schedule, steps, fn_output_signature=tf.float32))
    return compute(tf.range(num_steps + 1)).numpy()


def test_d2l_is_plain_sgd_and_fast_has_momentum_and_weight_decay_and_changes_images():
    for model, size, rate in [("lenet", 256, 0.2), ("resnet18", 256, 0.1), ("resnet18", 512, 0.2)]:
        recipe = find_recipe("d2l", model)
        assert recipe.learning_rate(global_batch_size=size, num_steps=1) == rate
    assert float(recipe.create_optimizer(0.2, 100).learning_rate) == pytest.approx(0.2)
    for name, expected in ("d2l", (0, False, None)), ("fast", (0.9, True, 5e-4)):
        sgd = find_recipe(name, "lenet").create_optimizer(0.2, 100)
        assert isinstance(sgd, keras.optimizers.SGD)
        assert (sgd.momentum, sgd.nesterov, sgd.weight_decay) == expected
    used = {(r, m): of.augmentation for r, models in RECIPES.items() for m, of in models.items()}
    assert {key: kind for key, kind in used.items() if kind != "none"} == {
        ("fast", "lenet"): "shift", ("fast", "resnet18"): "flip",
    }  # fmt: skip


@pytest.mark.parametrize(("num_steps", "warmup"), [(10, 5), (235, 100), (2350, 470)])
def test_fast_rises_to_the_peak_and_falls_to_zero(num_steps, warmup):
    rates = rates_of(find_recipe("fast", "lenet"), 0.2, num_steps)
    assert np.argmax(rates) == warmup and rates[warmup] == pytest.approx(0.2)
    assert np.all(np.diff(rates[: warmup + 1]) >= 0) and np.all(np.diff(rates[warmup:]) <= 0)
    assert rates[-1] == pytest.approx(0, abs=1e-7)


@pytest.mark.parametrize("model", ["lenet", "resnet18", "a_new_model"])
def test_beyond_256_the_rate_of_fast_grows_with_the_square_root_of_the_batch(model):
    recipe = find_recipe("fast", model)
    rates = [
        recipe.learning_rate(global_batch_size=size, num_steps=10_000) / recipe.peak_learning_rate
        for size in (64, 256, 512, 1024, 4096)
    ]
    assert rates == [0.25, 1, pytest.approx(2**0.5), 2, 4]
    # A short run rises less high.
    short = [recipe.learning_rate(global_batch_size=256, num_steps=n) for n in (2350, 200, 40)]
    assert short == pytest.approx([recipe.peak_learning_rate * x for x in (1, 1, 0.2)])
    # It rises no faster.
    for num_steps, growth in ((60, 0.3), (800, 2)):
        peak = recipe.learning_rate(global_batch_size=1024, num_steps=num_steps)
        assert peak == pytest.approx(growth * recipe.peak_learning_rate)
        most = np.diff(rates_of(recipe, peak, num_steps)).max()
        assert most <= recipe.peak_learning_rate / 100 * 1.01


@pytest.mark.parametrize(
    ("recipe", "black", "white"), [("d2l", 0, 1), ("fast", -72.94 / 90.02, 182.06 / 90.02)]
)
def test_models_take_bytes_and_scale_them(recipe, black, white):
    model = find_recipe(recipe, "lenet").build_model(
        load_model_builder("lenet"), image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES, seed=0
    )
    assert model.inputs[0].dtype == "uint8"
    scale = next(layer for layer in model.layers if isinstance(layer, keras.layers.Rescaling))
    np.testing.assert_allclose(scale(np.uint8([0, 255])), [black, white], rtol=1e-5)


def test_the_reported_learning_rate_is_that_of_the_last_step():
    optimizer = RECIPES["fast"]["lenet"].create_optimizer(0.2, 1000)
    weight = keras.Variable([1.0])
    optimizer.build([weight])
    for _ in range(3):
        optimizer.apply([keras.ops.ones([1])], [weight])
    assert last_learning_rate(optimizer) == pytest.approx(0.2 * 2 / 200)  # Step 2, counted from 0.
