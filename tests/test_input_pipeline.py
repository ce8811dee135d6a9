"""Tests the order of examples: complete, seeded, resumable, equal for every strategy."""

import itertools

import numpy as np
import pytest

from app.data.input_pipeline import eval_dataset, num_steps_per_epoch, train_dataset


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
    ("num_examples", "size", "last_batch", "sizes"),
    [(10, 4, "keep", [4, 4, 2]), (10, 4, "drop", [4, 4]), (8, 4, "keep", [4, 4]),
     (3, 5, "keep", [3])],
)  # fmt: skip
def test_epochs_are_complete(num_examples, size, last_batch, sizes):
    assert num_steps_per_epoch(num_examples, size, last_batch) == len(sizes)
    dataset = train_dataset(
        *numbered(num_examples), seed=1, global_batch_size=size, last_batch=last_batch
    )
    for _ in range(2):
        epoch = index_batches(dataset, len(sizes))
        assert [len(batch) for batch in epoch] == sizes
        seen = sorted(itertools.chain(*epoch))
        assert len(set(seen)) == sum(sizes)
        if last_batch == "keep":
            assert seen == list(range(num_examples))


def test_epochs_differ_and_follow_from_the_seed():
    def first_two_epochs(seed):
        return index_batches(train_dataset(*numbered(300), seed=seed, global_batch_size=100), 6)

    assert first_two_epochs(1) == first_two_epochs(1)
    assert first_two_epochs(1) != first_two_epochs(2)
    batches = first_two_epochs(1)
    assert batches[:3] != batches[3:]


def test_images_are_flipped_in_about_every_other_epoch_by_seed_and_epoch_alone():
    images = np.zeros((200, 28, 28, 1), np.uint8)
    images[:, :, 0] = np.arange(200, dtype=np.uint8)[:, None, None] + 1  # A line on the left.
    labels = np.arange(200) % 10

    def flipped(num_steps, **options):
        """Returns a pair for each image of each step: which it is, and whether it is mirrored."""
        dataset = train_dataset(images, labels, seed=3, flip=True, **options)
        batches = [b.numpy() for b, _ in itertools.islice(dataset, num_steps)]
        return [
            [(int(image.max()) - 1, bool(image[0, -1, 0])) for image in batch] for batch in batches
        ]

    two_epochs = flipped(4, global_batch_size=100)
    first, second = (dict(two_epochs[e] + two_epochs[e + 1]) for e in (0, 2))
    assert 70 < sum(first.values()) < 130 and first != second
    assert flipped(2, global_batch_size=100, start_step=2) == two_epochs[2:]
    assert dict(flipped(1, global_batch_size=200)[0]) == first  # Whatever the batch.


@pytest.mark.parametrize("start_step", [0, 1, 3, 4, 7, 12])
def test_it_starts_at_any_step(start_step):
    def order(start):
        dataset = train_dataset(*numbered(25), seed=9, global_batch_size=8, start_step=start)
        return index_batches(dataset, 16 - start)

    assert order(start_step) == order(0)[start_step:]


def test_evaluation_is_in_order_and_ends():
    batches = index_batches(eval_dataset(*numbered(10), global_batch_size=4), 99)
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_automatic_tuning_is_off():
    for dataset in (
        train_dataset(*numbered(10), seed=0, global_batch_size=5),
        eval_dataset(*numbered(10), global_batch_size=5),
    ):
        assert dataset.options().autotune.enabled is False
