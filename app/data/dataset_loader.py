"""Loads the dataset of a run: real images if available, else generated ones."""

from app.data.data_sources import HOW_TO_GET, DataMissingError
from app.data.dataset import ImageDataset
from app.data.fashion_mnist import load_fashion_mnist
from app.data.synthetic import generate_synthetic
from app.options import Config
from app.runtime import console
from app.runtime.errors import DataError


def load_data(config: Config) -> ImageDataset:
    """Loads the images for `config`, with the number of training images that it asks for.

    Raises:
        DataError: the data is missing, damaged, or too small.
    """
    dataset = load_dataset(config, config.data.dataset)
    num_examples = config.data.num_train_examples
    if num_examples is None:
        return dataset
    if num_examples > dataset.num_train_examples:
        raise DataError(
            f"--num_train_examples={num_examples} must be at most {dataset.num_train_examples},"
            " the size of the training set"
        )
    return dataset.with_train_subset(num_examples, config.training.seed)


def load_dataset(config: Config, name: str) -> ImageDataset:
    """Loads a dataset by name; warns of generated images in place of real ones, and of others.

    Args:
        config: names the folder to search, and says whether to accept images with another hash.
        name: "fashion_mnist", "synthetic", or "auto" for the first that is available. A missing
            folder that was given, or damaged data, is never replaced by generated images.

    Raises:
        DataError: the data is missing or damaged.
    """
    if name == "synthetic":
        return generate_synthetic()
    data_dir, allow_unverified = config.data.data_dir, config.data.allow_unverified_data
    try:
        dataset = load_fashion_mnist(data_dir, allow_unverified=allow_unverified)
        if dataset.name == "unverified":
            console.warn("UNVERIFIED images, not those of Fashion-MNIST (--allow_unverified_data)")
        return dataset
    except DataMissingError as error:
        if name == "fashion_mnist" or data_dir:
            raise
        console.warn(
            "GENERATED images in place of Fashion-MNIST: accuracies are not comparable."
            f" {error.problem}. For the real data, {HOW_TO_GET}"
        )
        return generate_synthetic()
