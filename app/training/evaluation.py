"""Evaluates a strategy on the whole test set."""

from collections.abc import Callable

import tensorflow as tf

from app.data.dataset import ImageDataset
from app.data.input_pipeline import eval_dataset
from strategies.base import StepTotals, Strategy

_GLOBAL_BATCH_SIZE = 1000


def batches_to_evaluate(dataset: ImageDataset) -> tf.data.Dataset:
    """Returns the test images in batches, in order."""
    return eval_dataset(
        dataset.test_images, dataset.test_labels, global_batch_size=_GLOBAL_BATCH_SIZE
    )


def evaluate(
    strategy: Strategy, dataset: ImageDataset, on_batch: Callable[[], None] = lambda: None
) -> StepTotals:
    """Returns the totals over the whole test set, each example counted once.

    Args:
        strategy: the strategy to evaluate.
        dataset: the dataset with the test set.
        on_batch: called after each batch; an exception that it raises ends the evaluation.

    Raises:
        RuntimeError: the strategy counted another number of examples.
    """
    totals = strategy.evaluate(batches_to_evaluate(dataset), on_batch)
    if totals.examples != dataset.num_test_examples:
        raise RuntimeError(
            f"evaluated {totals.examples} examples instead of {dataset.num_test_examples}"
        )
    return totals
