"""The data set, generated or read, its subsets and hashes; the order of examples."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from app.data import fashion_mnist
from app.data.batches import (
    augmented_versions,
    batch_of_step,
    epoch_versions,
    eval_dataset,
    num_steps_per_epoch,
    train_dataset,
)
from app.data.fashion_mnist import load_data
from app.errors import DataError
from app.options import Config
from tests.conftest import generated

# The order of examples: complete, seeded, resumable, equal for every strategy.


def numbered(num_examples):
    """Images whose first two pixels are their index."""
    images = np.zeros((num_examples, 28, 28, 1), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 0] = np.divmod(np.arange(num_examples), 256)
    return images, (np.arange(num_examples) % 10).astype(np.uint8)


def index_batches(dataset, num_batches):
    batches = []
    for images, labels in itertools.islice(dataset, num_batches):
        images, labels = images.numpy(), labels.numpy()
        assert images.dtype == np.uint8 and labels.dtype == np.int32
        indices = images[:, 0, 0, 0].astype(int) * 256 + images[:, 0, 1, 0]
        np.testing.assert_array_equal(labels, indices % 10)
        batches.append(indices.tolist())
    return batches


@pytest.mark.parametrize(
    ("num_examples", "size", "sizes"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 5, [3])]
)
def test_epochs_are_complete_differ_and_follow_from_the_seed_from_any_step_on(
    num_examples, size, sizes
):
    def batches(num_batches, **options):
        dataset = train_dataset(*numbered(num_examples), global_batch_size=size, **options)
        return index_batches(dataset, num_batches)

    num_steps = len(sizes)
    assert num_steps_per_epoch(num_examples, size) == num_steps
    steps = batches(3 * num_steps, seed=1)
    for epoch in (steps[:num_steps], steps[num_steps : 2 * num_steps]):
        assert [len(batch) for batch in epoch] == sizes
        assert sorted(itertools.chain(*epoch)) == list(range(num_examples))
    assert batches(3 * num_steps - 2, seed=1, start_step=2) == steps[2:]
    if num_examples > 3:
        assert steps[:num_steps] != steps[num_steps : 2 * num_steps]
        assert steps != batches(3 * num_steps, seed=2)


@pytest.mark.parametrize(
    ("augmentation", "places"),
    [("flip", {(2, 2), (2, 4)}), ("shift", {*itertools.product((1, 2, 3), repeat=2)})],
)
def test_images_are_changed_in_half_of_the_epochs_by_seed_and_epoch_alone(augmentation, places):
    images = np.zeros((240, 5, 7, 1), np.uint8)
    images[:, 2, 2, 0] = np.arange(240) + 1
    labels = np.arange(240) % 10

    def shown(num_steps, **options):
        """Returns a pair for each image of each step: which it is, and the place of its dot."""
        dataset = train_dataset(images, labels, seed=3, augmentation=augmentation, **options)
        batches = [batch.numpy() for batch, _ in itertools.islice(dataset, num_steps)]
        return [
            [(image.max() - 1, tuple(np.argwhere(image)[0, :2].tolist())) for image in batch]
            for batch in batches
        ]

    two_epochs = shown(4, global_batch_size=120)
    first, second = (dict(two_epochs[e] + two_epochs[e + 1]) for e in (0, 2))
    counts = collections.Counter(first.values())
    assert 90 < counts[2, 2] < 150 and {*counts} == places and first != second
    assert shown(2, global_batch_size=120, start_step=2) == two_epochs[2:]
    assert dict(shown(1, global_batch_size=240)[0]) == first  # Whatever the batch.
    of_seed = [epoch_versions(240, seed, 0, augmentation).numpy() for seed in (3, 4)]
    assert not np.array_equal(*of_seed)


@pytest.mark.parametrize("augmentation", ["none", "flip", "shift"])
def test_a_batch_computed_from_the_arrays_is_that_of_the_pipeline(augmentation):
    arrays, options = small(25), {"seed": 3, "global_batch_size": 8, "augmentation": augmentation}
    arrays = arrays.train_images, arrays.train_labels
    for step, batch in enumerate(itertools.islice(train_dataset(*arrays, **options), 6)):
        own = batch_of_step(*arrays, step=step, **options)
        for found, expected in zip(batch, own, strict=True):
            np.testing.assert_array_equal(found.numpy(), expected, strict=True)


def test_a_shifted_image_has_zeros_where_nothing_remains():
    image = np.arange(1, 7, dtype=np.uint8).reshape(1, 2, 3, 1)
    unchanged, *shifted = [x[0, :, :, 0] for x in augmented_versions(image, "shift")]
    assert unchanged.tolist() == [[1, 2, 3], [4, 5, 6]]
    found = {tuple(map(tuple, x.tolist())) for x in shifted}
    assert len(found) == 8
    assert {((0, 0, 0), (0, 1, 2)), ((5, 6, 0), (0, 0, 0)), ((0, 1, 2), (0, 4, 5))} <= found


def test_evaluation_is_in_order_and_ends():
    batches = index_batches(eval_dataset(*numbered(10), global_batch_size=4), 99)
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


# Data sets.


def small(num_train=200, seed=0):
    return generated(num_train, 50, seed)


def test_generated_set_has_the_form_of_the_real_one_and_follows_from_the_seed():
    dataset = small()
    for images, labels, count in (
        (dataset.train_images, dataset.train_labels, 200),
        (dataset.test_images, dataset.test_labels, 50),
    ):
        assert images.shape == (count, 28, 28, 1) and images.dtype == labels.dtype == np.uint8
    assert np.bincount(dataset.train_labels).tolist() == [20] * 10
    means = dataset.train_images.mean(axis=(1, 2, 3))
    assert np.all(means > 3) and np.all(means < 200)
    assert dataset.sha256() == small().sha256() != small(seed=1).sha256()
    assert dataset.sha256()[:12] == "fff960cf8521"  # With the pinned NumPy.
    assert not np.array_equal(dataset.train_images[:50], dataset.test_images)


@pytest.mark.parametrize("num_examples", [57, 200])
def test_subsets_are_balanced_and_keep_the_order(num_examples):
    dataset = small()
    subset = dataset.with_train_subset(num_examples, seed=4)
    counts = np.bincount(subset.train_labels, minlength=10)
    assert counts.sum() == num_examples and counts.max() - counts.min() <= 1
    rows = {image.tobytes(): i for i, image in enumerate(dataset.train_images)}
    positions = [rows[image.tobytes()] for image in subset.train_images]
    assert positions == sorted(set(positions))
    assert np.array_equal(subset.train_labels, dataset.train_labels[positions])
    assert subset.test_images is dataset.test_images
    tests = dataset.with_test_subset(10, seed=4)
    assert sorted(tests.test_labels) == [*range(10)] and tests.train_images is dataset.train_images
    again, other = (dataset.with_train_subset(num_examples, seed=s).sha256() for s in (4, 5))
    assert subset.sha256() == again and (num_examples == 200 or again != other)


def test_the_hash_is_of_labels_and_order_too():
    dataset = small()
    labels, images = np.roll(dataset.train_labels, 1), dataset.train_images[::-1]
    order = {"train_images": images, "train_labels": dataset.train_labels[::-1]}
    variants = [dataclasses.replace(dataset, **own) for own in ({"train_labels": labels}, order)]
    assert len({each.sha256() for each in (dataset, *variants)}) == 3


def test_damaged_data_is_not_replaced(monkeypatch):
    def load_fashion_mnist(data_dir):
        raise DataError("damaged; download it again")

    monkeypatch.setattr(fashion_mnist, "load_fashion_mnist", load_fashion_mnist)
    with pytest.raises(DataError, match="damaged"):
        load_data(Config.of(dataset="auto"))
