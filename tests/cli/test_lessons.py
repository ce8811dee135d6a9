"""The lessons in `examples/`: each is a training in one file, equal to the program's."""

import gzip
import importlib
import sys

import numpy as np
import pytest
import tensorflow as tf

from app.data.dataset import IMAGE_SHAPE, NUM_CLASSES
from app.data.fashion_mnist import load_fashion_mnist
from app.data.synthetic import generate_synthetic
from app.training.recipes import find_recipe
from models import load_model_builder
from tests.conftest import CPUS, ROOT
from tests.small_models import new_strategy

NUM_STEPS = 12
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


def train_in_the_program(dataset, values, num_replicas):
    """Trains with the strategy `manual`, from these weights; returns the weights of all copies."""
    recipe = find_recipe("d2l", "lenet")
    strategy = new_strategy("manual", num_replicas)
    strategy.build(
        lambda: recipe.build_model(
            load_model_builder("lenet"), image_shape=IMAGE_SHAPE, num_classes=NUM_CLASSES, seed=0
        ),
        lambda: recipe.create_optimizer(recipe.peak_learning_rate, len(dataset)),
    )
    for replica in strategy.replicas:
        for weight, value in zip(replica.model.trainable_variables, values, strict=True):
            weight.assign(value)
    strategy.train_steps(strategy.distribute(dataset), len(dataset))
    return [[w.numpy() for w in replica.model.trainable_variables] for replica in strategy.replicas]


def assert_equal(copies, others, devices):
    for params, right, device in zip(copies, others, devices, strict=True):
        for param, value in zip(params, right, strict=True):
            assert param.device.endswith(device.removeprefix("/device:"))
            np.testing.assert_array_equal(param.numpy(), value)


# MirroredStrategy rounds the sizes of shards up: 16 examples are 6, 6 and 4, not 6, 5 and 5.
@pytest.mark.parity
@pytest.mark.parametrize(("num_devices", "ways"), [(3, ["by_hand"]), (4, ["by_hand", "mirrored"])])
def test_the_lesson_has_the_bits_of_the_program_and_of_its_mirrored_half(
    load, data, num_devices, ways
):
    lesson, devices = load("data_parallel"), CPUS[:num_devices]
    (images, labels), _ = data
    dataset = tf.data.Dataset.from_tensor_slices((images, labels.astype(np.int32)))
    dataset = dataset.shuffle(len(images), seed=0).batch(16)
    batches = list(dataset)
    dataset = tf.data.Dataset.from_generator(lambda: batches, output_signature=dataset.element_spec)
    dataset = dataset.apply(tf.data.experimental.assert_cardinality(len(batches)))
    values = lesson.initial_values()
    expected = train_in_the_program(dataset, values, num_devices)
    assert not np.array_equal(expected[0][0], values[0])
    for way in ways:
        device_params, shards_of, train_batch = getattr(lesson, way)(dataset, values, devices)
        for batch in shards_of:
            train_batch(*batch)
        assert_equal(device_params, expected, devices)


def test_the_lesson_compares_both_ways_and_plots_them(load, monkeypatch, tmp_path, data, capsys):
    lesson = load("data_parallel")
    monkeypatch.chdir(tmp_path)
    data = [(images, labels.astype(np.int32)) for images, labels in data]
    monkeypatch.setattr(lesson, "load_data", lambda: data)
    monkeypatch.setattr(lesson, "choose_devices", lambda number: CPUS[:number])
    monkeypatch.setattr(sys, "argv", ["data_parallel.py", "--num_gpus=2", "--num_epochs=1"])
    lesson.main()
    *_, by_hand, mirrored, last = capsys.readouterr().out.splitlines()
    assert by_hand.startswith("by_hand: test acc: 0.") and mirrored.startswith("mirrored: test acc")
    assert last == "4 of 4 copies are bitwise identical."
    assert (tmp_path / "data_parallel.png").stat().st_size > 10_000


def test_the_wrong_all_reduce_leaves_each_device_but_the_first_its_own_gradient(load, data):
    lesson, other = load("data_parallel"), load("wrong_all_reduce")
    (images, labels), _ = data
    batch, devices = (tf.constant(images[:10]), tf.constant(labels[:10], tf.int32)), CPUS[:3]
    random = np.random.default_rng(1)
    values = [random.normal(0, 0.1, shape).astype(np.float32) for shape in lesson.SHAPES]
    by_hand, right, wrong = [], [], []
    for copies, create in (
        (by_hand, lesson.by_hand),
        (right, other.by_hand_with(other.right)),
        (wrong, other.by_hand_with(other.wrong)),
    ):
        device_params, _, train_batch = create(None, values, devices)
        train_batch(*batch)
        copies += [[param.numpy() for param in params] for params in device_params]
    local = []
    for shard in zip(*(lesson.split_batch(each, devices) for each in batch), strict=True):
        weights = [tf.Variable(value) for value in values]
        lesson.sgd(weights, lesson.local_gradients(weights, *shard, 10))
        local.append([weight.numpy() for weight in weights])
    for got, expected in ((right, by_hand), (wrong, [by_hand[0], *local[1:]])):
        for params, others in zip(got, expected, strict=True):
            for param, value in zip(params, others, strict=True):
                # Graphs may fuse a multiplication and a subtraction.
                np.testing.assert_allclose(param, value, rtol=0, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(wrong[1], right[1], strict=True)) > 1e-3


def test_the_wrong_all_reduce_is_trained_and_plotted(load, monkeypatch, tmp_path, data, capsys):
    lesson = load("wrong_all_reduce")
    monkeypatch.chdir(tmp_path)
    data = [(images, labels.astype(np.int32)) for images, labels in data]
    monkeypatch.setattr(lesson, "load_data", lambda: data)
    monkeypatch.setattr(lesson, "choose_devices", lambda number: CPUS[:number])
    monkeypatch.setattr(sys, "argv", ["wrong_all_reduce.py", "--num_gpus=2", "--num_epochs=1"])
    lesson.main()
    printed = [line for line in capsys.readouterr().out.splitlines() if "weights of each" in line]
    for line in printed:
        assert line.startswith("  test accuracy with the weights of each device: 0.")
        assert line.count(", ") == 1
    assert len(printed) == 2
    assert (tmp_path / "wrong_all_reduce.png").stat().st_size > 10_000


def test_the_lessons_read_the_folder_of_the_program(load, monkeypatch, tmp_path, small_data):
    for path in small_data.iterdir():
        (tmp_path / f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
    monkeypatch.setenv("FASHION_MNIST_DIR", str(tmp_path))
    (images, labels), (test_images, test_labels) = load("data_parallel").load_data()
    right = load_fashion_mnist(None, allow_unverified=True)
    np.testing.assert_array_equal(images, right.train_images)
    np.testing.assert_array_equal(labels, right.train_labels)
    np.testing.assert_array_equal(test_images, right.test_images)
    np.testing.assert_array_equal(test_labels, right.test_labels)


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
