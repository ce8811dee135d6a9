"""Subsets, hashes and the generated set."""

import dataclasses

import numpy as np
import pytest

from app.data.dataset import ImageDataset
from app.data.dataset_loader import load_dataset, with_train_subset
from app.data.synthetic import generate_synthetic
from app.runtime.errors import DataError


def small(num_train=200, seed=0):
    return generate_synthetic(seed=seed, num_train=num_train, num_test=50)


def test_generated_set_has_the_form_of_the_real_one():
    dataset = small()
    assert dataset.name == "synthetic"
    assert (dataset.image_shape, dataset.num_classes) == ((28, 28, 1), 10)
    assert dataset.train_images.shape == (200, 28, 28, 1) and dataset.train_images.dtype == np.uint8
    assert dataset.test_images.shape == (50, 28, 28, 1) and dataset.test_labels.dtype == np.uint8
    assert np.bincount(dataset.train_labels).tolist() == [20] * 10
    means = dataset.train_images.mean(axis=(1, 2, 3))
    assert np.all(means > 3) and np.all(means < 200)


def test_generated_set_follows_from_the_seed():
    assert small().sha256() == small().sha256()
    assert small().sha256() != small(seed=1).sha256()
    assert not np.array_equal(small().train_images[:50], small().test_images)


def test_classes_can_be_told_apart_but_not_by_their_mean_image():
    """Nearest class mean is right far more often than chance, far from always."""
    dataset = small(num_train=1000)
    pixels = dataset.train_images.reshape(1000, -1).astype(float)
    means = np.stack([pixels[dataset.train_labels == label].mean(axis=0) for label in range(10)])
    distances = ((dataset.test_images.reshape(50, 1, -1) - means) ** 2).sum(axis=-1)
    accuracy = np.mean(np.argmin(distances, axis=1) == dataset.test_labels)
    assert 0.4 < accuracy < 0.9


@pytest.mark.parametrize("num_examples", [1, 10, 57, 100, 200])
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
    again, other = (dataset.with_train_subset(num_examples, seed=s).sha256() for s in (4, 5))
    assert subset.sha256() == again and (num_examples == 200 or again != other)


def test_hash_sees_images_labels_and_order():
    dataset = small()
    changed = dataset.train_labels.copy()
    changed[0] = (changed[0] + 1) % 10
    variants = [
        dataclasses.replace(dataset, train_labels=changed),
        dataclasses.replace(
            dataset,
            train_images=dataset.train_images[::-1],
            train_labels=dataset.train_labels[::-1],
        ),
    ]
    assert len({dataset.sha256(), *(variant.sha256() for variant in variants)}) == 3


def test_a_subset_larger_than_the_set_is_refused():
    with pytest.raises(DataError, match="--num_train_examples=201 must be at most 200"):
        with_train_subset(small(), 201, seed=0)
    assert with_train_subset(small(), None, seed=0).sha256() == small().sha256()


def test_auto_falls_back_with_a_warning_but_not_from_a_named_folder(monkeypatch, tmp_path):
    from app.data import dataset_loader

    def missing(data_dir, *, allow_unverified):
        raise dataset_loader.DataMissingError("nowhere; get it")

    monkeypatch.setattr(dataset_loader, "load_fashion_mnist", missing)
    monkeypatch.setattr(dataset_loader, "generate_synthetic", small)
    told = []
    options = {"allow_unverified": False, "warn": told.append}
    dataset = load_dataset("auto", data_dir=None, **options)
    assert isinstance(dataset, ImageDataset) and dataset.name == "synthetic"
    assert len(told) == 1 and "GENERATED" in told[0] and "nowhere" in told[0]
    for name, data_dir in [("auto", str(tmp_path)), ("fashion_mnist", None)]:
        with pytest.raises(DataError, match="nowhere"):
            load_dataset(name, data_dir=data_dir, **options)
    assert len(told) == 1


def test_auto_does_not_replace_damaged_data(monkeypatch):
    from app.data import dataset_loader

    def damaged(data_dir, *, allow_unverified):
        raise DataError("damaged; get it")

    monkeypatch.setattr(dataset_loader, "load_fashion_mnist", damaged)
    with pytest.raises(DataError, match="damaged"):
        load_dataset("auto", data_dir=None, allow_unverified=False, warn=print)
