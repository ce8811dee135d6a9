"""The lessons in `examples/`: each is a training in one file, equal to the program's."""

import gzip
import importlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from app.data.dataset import IMAGE_SHAPE, NUM_CLASSES
from app.data.fashion_mnist import load_fashion_mnist
from app.data.input_pipeline import train_dataset
from app.data.synthetic import generate_synthetic
from app.training.recipes import find_recipe
from conftest import CPUS, ROOT, run_python
from models import load_model_builder
from small_models import new_strategy

NUM_STEPS = 50
NUM_EXAMPLES = 16 * NUM_STEPS - 5  # The last batch is short.


@pytest.fixture(scope="module")
def load():
    """Imports a file of `examples/`."""
    sys.path.insert(0, str(ROOT / "examples"))
    yield importlib.import_module
    sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def data():
    images = generate_synthetic()
    train = images.train_images[:NUM_EXAMPLES], images.train_labels[:NUM_EXAMPLES]
    return train, (images.test_images[:100], images.test_labels[:100])


def train_in_the_program(values, num_replicas, images, labels):
    """Trains with the strategy `manual`, from these weights; returns the weights of all copies."""
    recipe = find_recipe("d2l", "lenet")
    strategy = new_strategy("manual", num_replicas)
    strategy.build(
        lambda: recipe.build_model(
            load_model_builder("lenet"), image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES, seed=0
        ),
        lambda: recipe.create_optimizer(recipe.peak_learning_rate, NUM_STEPS),
    )
    for replica in strategy.replicas:
        for weight, value in zip(replica.model.trainable_variables, values, strict=True):
            weight.assign(value)
    batches = train_dataset(images, labels, seed=0, global_batch_size=16)
    strategy.train_steps(strategy.distribute(batches), NUM_STEPS)
    return [[w.numpy() for w in replica.model.trainable_variables] for replica in strategy.replicas]


@pytest.mark.parity
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_the_lesson_has_the_bits_of_the_program_and_of_its_mirrored_half(
    load, monkeypatch, data, num_replicas
):
    lesson = load("data_parallel")
    monkeypatch.setattr(lesson, "BATCH_SIZE", 16)
    devices, initial = CPUS[:num_replicas], lesson.initial_values()
    expected = train_in_the_program(initial, num_replicas, *data[0])
    assert not np.array_equal(expected[0][0], initial[0])
    for create in (lesson.by_hand, lesson.mirrored):
        per_device_params, accuracies = lesson.train(create, devices, data, num_epochs=1)
        assert len(per_device_params) == num_replicas
        assert 0 < accuracies[0] <= 1
        for params, device, right in zip(per_device_params, devices, expected, strict=True):
            for param, value in zip(params, right, strict=True):
                assert param.device.endswith(device.removeprefix("/device:"))
                np.testing.assert_array_equal(param.numpy(), value)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_the_lessons_read_the_folder_of_the_program(
    load, monkeypatch, tmp_path, small_data, is_compressed
):
    for path in small_data.iterdir():
        data = path.read_bytes()
        name = f"{path.name}.gz" if is_compressed else path.name
        (tmp_path / name).write_bytes(gzip.compress(data) if is_compressed else data)
    monkeypatch.setenv("FASHION_MNIST_DIR", str(tmp_path))
    (images, labels), (test_images, test_labels) = load("data_parallel").load_data()
    right = load_fashion_mnist(None, allow_unverified=True)
    np.testing.assert_array_equal(images, right.train_images)
    np.testing.assert_array_equal(labels, right.train_labels)
    np.testing.assert_array_equal(test_images, right.test_images)
    np.testing.assert_array_equal(test_labels, right.test_labels)


def test_a_lesson_without_images_prints_the_remedy_and_no_log_of_tensorflow(tmp_path):
    folder = tmp_path / "none"
    lesson = str(ROOT / "examples" / "data_parallel.py")
    result = run_python(lesson, "--epochs=1", env={"FASHION_MNIST_DIR": str(folder)})
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: Fashion-MNIST: ") and str(folder) in line
    assert line.endswith("; set FASHION_MNIST_DIR to the folder with its four .gz files")


@pytest.mark.parametrize("way", ["by_examples", "by_layers", "by_channels"])
@pytest.mark.parametrize("num_devices", [2, 3])
def test_each_way_computes_the_gradients_of_one_device(load, data, way, num_devices):
    lesson = load("three_ways")
    images = (data[0][0][: lesson.BATCH_SIZE].reshape(-1, 784) / 255).astype(np.float32)
    batch = tf.constant(images), tf.constant(data[0][1][: lesson.BATCH_SIZE], tf.int32)
    random, devices = np.random.default_rng(1), CPUS[:num_devices]
    params = [tf.constant(random.normal(0, 0.1, shape), tf.float32) for shape in lesson.SHAPES]
    found = getattr(lesson, way)(params, batch, devices)
    for gradient, right in zip(found, lesson.one_device(params, batch, devices), strict=True):
        assert np.linalg.norm(right) > 0.01
        # Sums of some hundred float32 terms, in another order.
        assert np.linalg.norm(gradient - right) < 1e-5 * np.linalg.norm(right)
