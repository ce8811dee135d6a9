"""The lessons in `examples/`: each is a training in one file, equal to the program's."""

import gzip
import importlib
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

import lockstep
from app.data.fashion_mnist import IMAGE_SHAPE, NUM_CLASSES
from app.training.recipes import find_recipe
from lockstep.data.file import save
from lockstep.data.trace import WEIGHT, About, Trace, Variable
from models import load_model_builder
from tests.conftest import CPUS, ROOT, generated, idx_files
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
    images = generated(NUM_EXAMPLES, 100)
    train = images.train_images, images.train_labels
    return train, (images.test_images, images.test_labels)


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


def test_the_lesson_trains_and_tests(load, data, capsys):
    lesson = load("data_parallel")
    sets = [(images, labels.astype(np.int32)) for images, labels in data]
    copies = [
        params
        for method in (lesson.by_hand, lesson.mirrored)
        for params in lesson.train(method, sets, CPUS[:2], num_epochs=1)
    ]
    by_hand, mirrored = capsys.readouterr().out.splitlines()
    assert by_hand.startswith("by_hand: test acc: 0.") and mirrored.startswith("mirrored: test acc")
    assert len({b"".join(param.numpy().tobytes() for param in params) for params in copies}) == 1


def test_the_wrong_all_reduce_leaves_each_device_but_the_first_its_own_gradient(load, data):
    lesson, other = load("data_parallel"), load("wrong_all_reduce")
    (images, labels), _ = data
    batch, devices = (tf.constant(images[:10]), tf.constant(labels[:10], tf.int32)), CPUS[:3]
    steps = []
    for all_reduce in (other.right, other.wrong):
        device_params, train_batch = other.create(all_reduce, devices)
        train_batch(*batch)
        steps.append([[param.numpy() for param in params] for params in device_params])
    device_params, _, train_batch = lesson.by_hand(None, lesson.initial_values(), devices)
    train_batch(*batch)
    by_hand = [[param.numpy() for param in params] for params in device_params]
    local = []
    for shard in zip(*(lesson.split_batch(each, devices) for each in batch), strict=True):
        weights = [tf.Variable(value, dtype="float32") for value in lesson.initial_values()]
        lesson.sgd(weights, lesson.local_gradients(weights, *shard, 10))
        local.append([weight.numpy() for weight in weights])
    right, wrong = steps
    for got, expected in ((right, by_hand), (wrong, [by_hand[0], *local[1:]])):
        for params, others in zip(got, expected, strict=True):
            for param, value in zip(params, others, strict=True):
                # Graphs may fuse a multiplication and a subtraction.
                np.testing.assert_allclose(param, value, rtol=0, atol=1e-6)
    assert max(np.abs(a - b).max() for a, b in zip(wrong[1], right[1], strict=True)) > 1e-3


def test_the_lessons_read_the_folder_of_the_program(load, monkeypatch, tmp_path):
    files = idx_files(30, 10)
    for name, content in files.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    monkeypatch.setenv("FASHION_MNIST_DIR", str(tmp_path))
    arrays = [array for pair in load("data_parallel").load_data() for array in pair]
    for array, content in zip(arrays, files.values(), strict=True):
        header = 16 if array.ndim == 4 else 8
        np.testing.assert_array_equal(array.ravel(), np.frombuffer(content, np.uint8)[header:])


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


def record(lesson, way, path, num_devices):
    """Trains three steps in one of the three ways, and writes a recording of its arrays."""
    names, steps = ("hidden/kernel", "hidden/bias", "logits/kernel", "logits/bias"), []

    def compute(params, batch, devices):
        gradients = way(params, batch, devices)
        steps.append([[tensor.numpy() for tensor in each] for each in (params, batch, gradients)])
        return gradients

    images = generated(3 * lesson.BATCH_SIZE, 10)
    pixels = (images.train_images.reshape(-1, 784) / 255).astype(np.float32)
    labels = images.train_labels.astype(np.int32)
    last = lesson.train(compute, CPUS[:num_devices], pixels, labels)
    settings = {"weights": list(names), "learning_rate": lesson.LEARNING_RATE}
    trace = Trace(About(
        "tensorflow", 1, steps=(0, 1, 2), variables=tuple(Variable(n, WEIGHT) for n in names),
        gradients=names, reduction="sum", optimizer={"class": "SGD"}, settings=([settings],) * 3,
    ))  # fmt: skip
    after = [*(params for params, _, _ in steps[1:]), [param.numpy() for param in last]]
    for step, (params, batch, gradients) in enumerate(steps):
        for kind, arrays in (
            *(("data", batch), ("raw", gradients), ("sums", gradients)),
            *(("before", params), ("after", after[step])),
        ):
            trace.put(step, kind, 0, arrays)
    save(trace, path)
    return path


def test_each_way_is_the_training_on_one_device_and_a_forgotten_sum_is_found(
    load, monkeypatch, tmp_path
):
    lesson = load("three_ways")
    monkeypatch.setattr(lesson, "NUM_STEPS", 3)
    one = record(lesson, lesson.one_device, tmp_path / "one.npz", 1)
    for way in (lesson.by_examples, lesson.by_layers, lesson.by_channels):
        verdict = lockstep.compare(one, record(lesson, way, tmp_path / f"{way.__name__}.npz", 3))
        assert verdict.status == "clean", str(verdict)
    # Each device keeps the gradient that comes through its own outputs.
    without_sum = types.SimpleNamespace(reduce=lambda add, per_device: next(iter(per_device)))
    monkeypatch.setattr(lesson, "functools", without_sum)
    verdict = lockstep.compare(one, record(lesson, lesson.by_channels, tmp_path / "wrong.npz", 3))
    assert (verdict.status, verdict.place.step) == ("fault", 0), str(verdict)
    assert {*verdict.place.tensors} == {"hidden/kernel", "hidden/bias"}
