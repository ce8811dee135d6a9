"""Loads the data of a training, without TensorFlow, which another thread may be importing."""

from app.config import TrainConfig
from app.data.dataset import ImageDataset
from app.data.dataset_loader import load_dataset, with_train_subset
from app.runtime import console


def load_data(config: TrainConfig) -> ImageDataset:
    """Loads the images for `config`.

    Raises:
        DataError: the data is missing, damaged, or too small.
    """
    dataset = load_dataset(
        config.dataset,
        data_dir=config.data_dir,
        allow_unverified=config.allow_unverified_data,
        warn=console.warn,
    )
    return with_train_subset(dataset, config.num_train_examples, config.seed)
