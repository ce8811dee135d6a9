"""Options of the model, the data, the hyperparameters and the computation."""

import dataclasses

from app.config.names import (
    COMPUTATION,
    DATASET_NAMES,
    HYPERPARAMETERS,
    MAX_FLOAT32,
    MODEL_AND_DATA,
    MODEL_NAMES,
    NUM_TRAIN_EXAMPLES,
    PRECISIONS,
    RECIPE_NAMES,
)
from app.config.option import option


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Selects the model and its recipe."""

    model: str = option(
        "lenet", "Network to train.", MODEL_AND_DATA, choices=MODEL_NAMES, affects_result=True
    )
    recipe: str = option(
        "d2l",
        'Learning rate, schedule, initial weights and augmentation: d2l as in "Dive into '
        'Deep Learning", fast a modern recipe.',
        MODEL_AND_DATA,
        choices=RECIPE_NAMES,
        affects_result=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataFileOptions:
    """Selects the files of the dataset."""

    data_dir: str | None = option(
        None,
        "Folder with the four Fashion-MNIST files, or a TFDS data directory. Without it:"
        " $FASHION_MNIST_DIR, then TFDS.",
        MODEL_AND_DATA,
        metavar="DIR",
    )
    allow_unverified_data: bool = option(
        False, "Accept data files whose hash is not that of Fashion-MNIST.", MODEL_AND_DATA
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DatasetOptions(DataFileOptions):
    """Selects the dataset."""

    dataset: str = option(
        "auto",
        "auto uses Fashion-MNIST where it is available, else generated images.",
        MODEL_AND_DATA,
        choices=DATASET_NAMES,
        affects_result=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SubsetOptions(DatasetOptions):
    """Selects the dataset and the number of training images."""

    num_train_examples: int | None = option(
        None,
        "Train on a class-balanced random subset of N examples, chosen by the seed.",
        MODEL_AND_DATA,
        metavar="N",
        low=1,
        high=NUM_TRAIN_EXAMPLES,
        affects_result=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """Sets the hyperparameters."""

    global_batch_size: int = option(
        256,
        "Examples in a step, over all replicas.",
        HYPERPARAMETERS,
        metavar="N",
        low=1,
        high=NUM_TRAIN_EXAMPLES,
        alias="batch_size",
        affects_result=True,
    )
    learning_rate: float | None = option(
        None,
        "Peak learning rate. Default: the recipe's.",
        HYPERPARAMETERS,
        metavar="X",
        above=0.0,
        high=MAX_FLOAT32,
        alias="lr",
        affects_result=True,
    )
    epochs: int = option(
        10,
        "Number of passes over the training set.",
        HYPERPARAMETERS,
        metavar="N",
        low=1,
        high=100_000,
        affects_result=True,
    )
    seed: int = option(
        0,
        "Seed of the initial weights and of the order of examples.",
        HYPERPARAMETERS,
        metavar="N",
        low=0,
        high=2**32 - 1,
        affects_result=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ComputationOptions:
    """Sets the precision and the compilation of a step."""

    precision: str = option(
        "float32",
        "Dtype that layers compute in; weights, updates and the loss are float32.",
        COMPUTATION,
        choices=PRECISIONS,
        affects_result=True,
    )
    jit_compile: bool = option(
        False,
        "Compile the forward and backward pass with XLA.",
        COMPUTATION,
        affects_result=True,
    )
    deterministic: bool = option(
        False,
        "Use only kernels whose results are bitwise identical in every run.",
        COMPUTATION,
        affects_result=True,
    )
