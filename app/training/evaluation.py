"""Evaluation on the whole test set."""

from collections.abc import Callable

import numpy as np

from app.data.dataset import ImageDataset
from app.data.input_pipeline import eval_dataset
from strategies.base import StepTotals, Strategy

EVAL_GLOBAL_BATCH_SIZE = 1000


def evaluate(
    strategy: Strategy, dataset: ImageDataset, on_batch: Callable[[], None] = lambda: None
) -> StepTotals:
    """Returns the totals over the whole test set, each image seen once.

    Args:
        strategy: what to evaluate.
        dataset: whose test part to take.
        on_batch: called after each batch; what it raises ends the evaluation.

    Raises:
        RuntimeError: the strategy saw another number of images.
    """
    test_set = eval_dataset(
        dataset.test_images, dataset.test_labels, global_batch_size=EVAL_GLOBAL_BATCH_SIZE
    )
    totals = strategy.evaluate(test_set, on_batch)
    if totals.examples != len(dataset.test_images):
        raise RuntimeError(
            f"evaluated {totals.examples} images instead of {len(dataset.test_images)}"
        )
    return totals


def softmax(logits: np.ndarray) -> np.ndarray:
    """Returns the probabilities of logits, both of shape `(n, num_classes)`."""
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return exponentials / exponentials.sum(axis=-1, keepdims=True)
