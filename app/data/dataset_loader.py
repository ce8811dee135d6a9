"""Loads the dataset of a run: real images if available, else generated ones."""

from collections.abc import Callable

from app.data.data_sources import HOW_TO_GET, DataMissingError
from app.data.dataset import ImageDataset
from app.data.fashion_mnist import load_fashion_mnist
from app.data.synthetic import generate_synthetic
from app.options import Config
from app.runtime import console
from app.runtime.errors import DataError


def load_data(config: Config) -> ImageDataset:
    """Loads the images for `config`.

    Raises:
        DataError: the data is missing, damaged, or too small.
    """
    dataset = load_dataset(
        config.data.dataset,
        data_dir=config.data.data_dir,
        allow_unverified=config.data.allow_unverified_data,
        warn=console.warn,
    )
    return with_train_subset(dataset, config.data.num_train_examples, config.training.seed)


def load_dataset(
    name: str,
    *,
    data_dir: str | None,
    allow_unverified: bool,
    warn: Callable[[str], None],
) -> ImageDataset:
    """Loads a dataset by name.

    Args:
        name: "fashion_mnist", "synthetic", or "auto" for the first that is available. A missing
            folder that was given, or damaged data, is never replaced by generated images.
        data_dir: folder to search; if given, no other place is searched.
        allow_unverified: accept real data whose hash differs.
        warn: called with a message if generated images replace real ones, or if unverified data is
            accepted.

    Raises:
        DataError: the data is missing or damaged.
    """
    if name == "synthetic":
        return generate_synthetic()
    try:
        dataset = load_fashion_mnist(data_dir, allow_unverified=allow_unverified)
        if dataset.name == "unverified":
            warn("UNVERIFIED images, not those of Fashion-MNIST (--allow_unverified_data)")
        return dataset
    except DataMissingError as error:
        if name == "fashion_mnist" or data_dir:
            raise
        warn(
            "GENERATED images in place of Fashion-MNIST: accuracies are not comparable."
            f" {error.problem}. For the real data, {HOW_TO_GET}"
        )
        return generate_synthetic()


def with_train_subset(dataset: ImageDataset, num_examples: int | None, seed: int) -> ImageDataset:
    """Returns the dataset with `num_examples` of its training images; None for all.

    Raises:
        DataError: there are fewer.
    """
    if num_examples is None:
        return dataset
    if num_examples > len(dataset.train_images):
        raise DataError(
            f"--num_train_examples={num_examples} must be at most {len(dataset.train_images)},"
            " the size of the training set"
        )
    return dataset.with_train_subset(num_examples, seed)
