"""The lessons in `examples/`: each is a training in one file, equal to the program's."""

import importlib
import re
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from app.training.recipes import find_recipe
from strategies.manual import ManualStrategy
from tests.conftest import CPUS, ROOT, assert_ok, run_python, write_images
from tests.small_models import lenet
from tests.verifier.recorder_scripts import needs, run_script

NUM_EXAMPLES = 16 * 12 - 5  # Batches of 16; the last one is short.


@pytest.fixture(scope="module")
def load():
    """Imports a file of `examples/`."""
    sys.path.insert(0, str(ROOT / "examples"))
    yield importlib.import_module
    sys.path.remove(str(ROOT / "examples"))


@pytest.fixture(scope="module")
def data(load, tmp_path_factory):
    """The images of a folder, as a lesson reads them: train and test."""
    folder = tmp_path_factory.mktemp("data")
    write_images(folder, NUM_EXAMPLES, 100)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FASHION_MNIST_DIR", str(folder))
        return load("data_parallel").load_data()


def train_in_the_program(dataset, values, num_replicas):
    """Trains with the strategy `manual`, from these weights; returns the weights of all copies."""
    rate = find_recipe("d2l", "lenet").peak_learning_rate
    strategy = ManualStrategy(CPUS[:num_replicas])
    strategy.build(lenet, lambda: keras.optimizers.SGD(rate))
    for replica in strategy.replicas:
        for weight, value in zip(replica.model.trainable_variables, values, strict=True):
            weight.assign(value)
    strategy.train_steps(strategy.distribute(dataset), len(dataset))
    return [[w.numpy() for w in replica.model.trainable_variables] for replica in strategy.replicas]


# MirroredStrategy rounds the sizes of shards up: 16 examples are 6, 6 and 4, not 6, 5 and 5.
@pytest.mark.parity
@pytest.mark.parametrize(("num_devices", "ways"), [(3, ["by_hand"]), (4, ["by_hand", "mirrored"])])
def test_the_lesson_has_the_bits_of_the_program_and_of_its_mirrored_half(
    load, data, monkeypatch, capsys, num_devices, ways
):
    lesson, devices = load("data_parallel"), CPUS[:num_devices]
    monkeypatch.setattr(lesson, "BATCH_SIZE", 16)
    dataset = tf.data.Dataset.from_tensor_slices(data[0]).shuffle(60_000, lesson.SEED).batch(16)
    values = lesson.initial_values()
    expected = train_in_the_program(dataset, values, num_devices)
    assert not np.array_equal(expected[0][0], values[0])
    for way in ways:
        device_params = lesson.train(getattr(lesson, way), data, devices, num_epochs=1)
        assert capsys.readouterr().out.startswith(f"{way}: epoch 1, test acc: 0.")
        for params, right, device in zip(device_params, expected, devices, strict=True):
            for param, value in zip(params, right, strict=True):
                assert param.device.endswith(device.removeprefix("/device:"))
                np.testing.assert_array_equal(param.numpy(), value)


def test_the_wrong_all_reduce_leaves_each_device_but_the_first_another_gradient(load, data):
    lesson, other = load("data_parallel"), load("wrong_all_reduce")
    (images, labels), _ = data
    batch, devices = (tf.constant(images[:10]), tf.constant(labels[:10])), CPUS[:3]
    ways = [other.create(all_reduce, devices) for all_reduce in (other.right, other.wrong)]
    by_hand, _, train_batch = lesson.by_hand(None, lesson.initial_values(), devices)
    for train in (train_batch, *(train for _, train in ways)):
        train(*batch)
    apart = [
        [
            max(np.abs(a - b).max() for a, b in zip(params, right, strict=True))
            for params, right in zip(device_params, by_hand, strict=True)
        ]
        for device_params, _ in ways
    ]
    # Graphs may fuse a multiplication and a subtraction.
    assert max(apart[0]) < 1e-6 and apart[1][0] < 1e-6 and min(apart[1][1:]) > 1e-3


def test_three_ways_train_like_one_device(load, data, monkeypatch, capsys):
    lesson = load("three_ways")
    monkeypatch.setattr(lesson, "NUM_STEPS", 3)
    train = np.resize(data[0][0], (300, 28, 28)), np.resize(data[0][1], 300)
    monkeypatch.setattr(lesson.data_parallel, "load_data", lambda: (train, None))
    monkeypatch.setattr(lesson.data_parallel, "choose_devices", lambda num_gpus: CPUS[:num_gpus])
    monkeypatch.setattr(sys, "argv", ["three_ways.py", "--num_gpus=3"])
    lesson.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["by_examples", "by_layers", "by_channels"]
    assert all(float(re.search(r"at most (\S+) apart", line)[1]) < 1e-6 for line in lines)


# The programs of `docs/exercises.md`; its commands are run by `test_docs`.


def test_unequal_shards_on_unequal_devices_are_the_training_on_one_device(load, data):
    data_parallel, unequal_devices = load("data_parallel"), load("unequal_devices")
    images = tf.constant(np.resize(data[0][0], (256, 28, 28, 1)))
    labels = tf.constant(np.resize(data[0][1], 256))
    start = [tf.Variable(value) for value in data_parallel.initial_values()]
    right = data_parallel.local_gradients(start, images, labels, 256)
    for sizes in unequal_devices.SHARDS.values():
        params, train_batch = unequal_devices.create(sizes, CPUS[:2], slower=2)
        train_batch(images, labels)
        for param, value, gradient in zip(params, start, right, strict=True):
            moved = (value - param) / data_parallel.LEARNING_RATE
            assert np.any(moved) or not np.any(gradient)
            np.testing.assert_allclose(moved, gradient, rtol=1e-3, atol=1e-6)


@needs("jax")
def test_pmap_and_vmap_compute_the_same_gradients():
    flags = "--xla_force_host_platform_device_count=2"
    done = assert_ok(run_script("jax", ROOT / "examples" / "pmap_vmap.py", XLA_FLAGS=flags))
    *devices, shards, mean = done.stdout.splitlines()
    names = ("vmap: gradients on 1 of 2 devices", "pmap: gradients on 2 of 2 devices")
    assert (*devices,) == names
    for line in (shards, mean):
        assert float(re.search(r"at most (\S+) apart", line)[1]) < 1e-7


@pytest.mark.slow
@needs("jax")
def test_waiting_changes_no_weight():
    done = assert_ok(run_script("jax", ROOT / "examples" / "without_waiting.py"))
    assert done.stdout.splitlines()[-1] == "same weights: True"


@pytest.mark.slow
def test_compile_outside_of_the_scope_does_what_the_page_says():
    page = (ROOT / "docs" / "exercises.md").read_text(encoding="utf-8")
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", page, re.DOTALL)
    assert assert_ok(run_python("-c", code, cwd=ROOT)).stdout == shown
