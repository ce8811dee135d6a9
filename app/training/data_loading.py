"""Loads the data of a training, without TensorFlow, which another thread may be importing."""

from app.data.dataset import ImageDataset
from app.data.dataset_loader import load_dataset, with_train_subset
from app.options import Config
from app.runtime import console


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
