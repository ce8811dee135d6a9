"""Evaluates a strategy on the whole test set."""

from collections.abc import Callable

from app.data.dataset import ImageDataset
from strategies.base import StepTotals, Strategy


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
    totals = strategy.evaluate(dataset.batches_to_evaluate(), on_batch)
    if totals.examples != dataset.num_test_examples:
        raise RuntimeError(
            f"evaluated {totals.examples} examples instead of {dataset.num_test_examples}"
        )
    return totals
