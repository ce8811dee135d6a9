"""Shared code of the experiments `pipeline`, `tensor` and `sharded`: trainings and traffic."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from app.config import TrainConfig
from app.demos import demo_setup, presentation
from app.devices.device_setup import Devices

if TYPE_CHECKING:  # Not imported before its devices are set up.
    from app.data.dataset import ImageDataset
    from app.verification.difference import WeightDifference
    from strategies.base import Strategy

NUM_STEPS = 3


def build(
    training: TrainConfig,
    prepared: Devices,
    dataset: "ImageDataset",
    strategy: str,
    **options: Any,
) -> tuple[Any, Callable[[], float]]:
    """Builds a strategy for a training.

    Returns:
        The strategy, and a function that runs `NUM_STEPS` steps and returns their mean loss.
    """
    config = dataclasses.replace(training, strategy=strategy, **options)
    _, built, iterator = demo_setup.create(config, prepared, dataset)
    return built, lambda: demo_setup.make_steps(built, iterator, NUM_STEPS).loss


def show_traffic(strategy: "Strategy", num_examples: int) -> None:
    """Prints the bytes that devices send in a step, by formula and counted in the graph."""
    import numpy as np

    from app.performance.traffic_count import count_traffic
    from app.performance.traffic_formula import terms_of

    image_shape = strategy.model.input_shape[1:]
    batch = np.zeros((num_examples, *image_shape), np.uint8), np.zeros(num_examples, np.int32)
    counted = count_traffic(strategy, batch)
    rows: list[list[str]] = []
    terms = terms_of(strategy, num_examples)
    for term in terms:
        rows.append([term.name, term.formula, f"{term.size_bytes:,}", ""])
    total = sum(term.size_bytes for term in terms)
    rows.append(["in all", "", f"{total:,}", f"{sum(counted.links.values()):,}"])
    presentation.show(
        f"what travels in a step, {num_examples} images",
        ["", "formula", "bytes", "counted in the graph"],
        rows,
    )


def difference(first: "Strategy", second: "Strategy") -> "WeightDifference":
    """Returns the difference between the states of two strategies."""
    from app.verification.difference import WeightDifference

    return WeightDifference.between(first.state(), second.state())
