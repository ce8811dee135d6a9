"""The order of examples; the generated data set, subsets and hashes."""

import collections
import dataclasses
import itertools

import numpy as np
import pytest

from app.data.batches import (
    augmented_versions,
    batch_of_step,
    epoch_versions,
    num_steps_per_epoch,
    train_dataset,
)
from tests.conftest import generated


def numbered(num_examples):
    """Images whose first two pixels are their index."""
    images = np.zeros((num_examples, 28, 28, 1), np.uint8)
    images[:, 0, 0, 0], images[:, 0, 1, 0] = np.divmod(np.arange(num_examples), 256)
    return images, (np.arange(num_examples) % 10).astype(np.uint8)


@pytest.mark.parametrize(
    ("num_examples", "size", "sizes"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 5, [3])]
)
def test_epochs_are_complete_differ_and_follow_from_the_seed_from_any_step_on(
    num_examples, size, sizes
):
    def batches(num_batches, **options):
        dataset, found = train_dataset(*arrays, global_batch_size=size, **options), []
        for images, labels in itertools.islice(dataset, num_batches):
            images, labels = images.numpy(), labels.numpy()
            assert images.dtype == np.uint8 and labels.dtype == np.int32
            found.append((images[:, 0, 0, 0].astype(int) * 256 + images[:, 0, 1, 0]).tolist())
            np.testing.assert_array_equal(labels, np.array(found[-1]) % 10)
        return found

    arrays, num_steps = numbered(num_examples), len(sizes)
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
    options = {"seed": 3, "global_batch_size": 8, "augmentation": augmentation}
    arrays = numbered(25)
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


def test_generated_images_follow_from_the_seed_and_their_hash_from_images_labels_and_order():
    dataset = generated(200, 50)
    assert dataset.test_images.shape == (50, 28, 28, 1)
    assert dataset.train_images.dtype == dataset.test_labels.dtype == np.uint8
    assert np.bincount(dataset.train_labels).tolist() == [20] * 10
    assert dataset.sha256() == generated(200, 50).sha256() != generated(200, 50, seed=1).sha256()
    assert dataset.sha256()[:12] == "fff960cf8521"  # With the pinned NumPy.
    labels, images = np.roll(dataset.train_labels, 1), dataset.train_images[::-1]
    order = {"train_images": images, "train_labels": dataset.train_labels[::-1]}
    variants = [dataclasses.replace(dataset, **own) for own in ({"train_labels": labels}, order)]
    assert len({each.sha256() for each in (dataset, *variants)}) == 3


def test_subsets_are_balanced_and_keep_the_order():
    dataset = generated(200, 50)
    subset = dataset.with_train_subset(57, seed=4)
    counts = np.bincount(subset.train_labels, minlength=10)
    assert counts.sum() == 57 and counts.max() - counts.min() <= 1
    rows = {image.tobytes(): i for i, image in enumerate(dataset.train_images)}
    positions = [rows[image.tobytes()] for image in subset.train_images]
    assert positions == sorted(set(positions))
    assert np.array_equal(subset.train_labels, dataset.train_labels[positions])
    assert subset.test_images is dataset.test_images
    tests = dataset.with_test_subset(10, seed=4)
    assert sorted(tests.test_labels) == [*range(10)] and tests.train_images is dataset.train_images
    again, other = (dataset.with_train_subset(57, seed=seed).sha256() for seed in (4, 5))
    assert subset.sha256() == again != other
