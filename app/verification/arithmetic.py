"""Tests hypotheses: whether an array is a given sum of other arrays, within rounding."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from app.verification.measurement import SMALLEST, UNIT_ROUNDOFF
from app.verification.split import Split

Arrays = Mapping[str, np.ndarray]


def _to_bfloat16(array: np.ndarray) -> np.ndarray:
    """Rounds float32 to nearest, ties to even, and keeps the upper half of the bits."""
    bits = np.ascontiguousarray(array, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return rounded.astype(np.uint32).view(np.float32).reshape(array.shape)


def _to_float16(array: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return array.astype(np.float16).astype(array.dtype)


# Name → rounding of a float32 array, relative error of one rounding, smallest number.
REDUCED_PRECISIONS = {
    "bfloat16": (_to_bfloat16, 2.0**-8, SMALLEST),
    "float16": (_to_float16, 2.0**-11, 2.0**-25),
}


def is_weighted_sum(
    got: Arrays,
    parts: Sequence[Arrays],
    weights: Sequence[float],
    *,
    rounding: Callable[[np.ndarray], np.ndarray] = lambda array: array,
) -> bool:
    """Returns whether every array is Σ weight · part, computed in float32.

    Args:
        got: tensor → array.
        parts: R such mappings.
        weights: R numbers.
        rounding: applied to each part first.
    """
    for tensor, array in got.items():
        terms = [
            weight * rounding(part[tensor]).astype(np.float64)
            for weight, part in zip(weights, parts, strict=True)
        ]
        bound = (len(terms) + 2) * UNIT_ROUNDOFF * sum(map(np.abs, terms)) + SMALLEST
        if not np.all(np.abs(array - sum(terms)) <= bound):
            return False
    return True


def is_update(actual: Arrays, before: Arrays, expected: Arrays) -> bool:
    """Returns whether every array is the expected update of a weight, within rounding.

    Args:
        actual: weights after the step minus weights before it.
        before: weights before the step.
        expected: the update.
    """
    return all(
        np.all(
            np.abs(array - expected[t])
            <= 4 * UNIT_ROUNDOFF * (np.abs(before[t]) + np.abs(array)) + SMALLEST
        )
        for t, array in actual.items()
    )


def is_reduced(got: Arrays, parts: Sequence[Arrays], name: str) -> bool:
    """Returns whether every array is the sum of the parts, computed in a reduced precision."""
    rounding, unit, smallest = REDUCED_PRECISIONS[name]
    if is_weighted_sum(got, parts, [1.0] * len(parts), rounding=rounding):
        return True
    for tensor, array in got.items():
        terms = [part[tensor].astype(np.float64) for part in parts]
        bound = len(terms) * (unit * np.sum(np.abs(terms), axis=0) + smallest)
        if not (has_values_of(array, name) and np.all(np.abs(array - sum(terms)) <= bound)):
            return False
    return True


def has_values_of(array: np.ndarray, name: str) -> bool:
    """Returns whether a reduced precision represents every element exactly."""
    rounding = REDUCED_PRECISIONS[name][0]
    return np.array_equal(array, rounding(array))


def fit(got: Arrays, parts: Sequence[Arrays]) -> np.ndarray:
    """Returns the R weights that minimise the distance of Σ weight · part to `got`.

    NaN if a part is not finite.
    """
    gram, projections = np.zeros((len(parts), len(parts))), np.zeros(len(parts))
    for tensor, array in got.items():
        rows = np.stack([np.asarray(part[tensor], np.float64).ravel() for part in parts])
        gram += rows @ rows.T
        projections += rows @ np.asarray(array, np.float64).ravel()
    if not np.isfinite(gram).all():  # A gradient overflowed.
        return np.full(len(parts), np.nan)
    return np.linalg.lstsq(gram, projections, rcond=None)[0]


def scaling_mistakes(sizes: Sequence[int], split: Split) -> Iterator[tuple[list[float], str]]:
    """Yields the factor on each shard's gradient for each scaling mistake, and its description.

    Args:
        sizes: number of examples of each shard.
        split: split of the training.
    """
    shards, examples = len(sizes), sum(sizes)
    counts = {
        "replicas": split.num_replicas,
        "micro-batches of a replica": split.shards_per_replica,
        "micro-batches of all replicas": split.num_shards if split.num_replicas > 1 else 1,
    }
    for name, count in counts.items():
        if count > 1 and (name == "replicas" or split.shards_per_replica > 1):
            many = f"{count} is the number of {name}"
            yield [count] * shards, f"{many}, scaled once too often or not at all"
            yield [1 / count] * shards, f"{many}, divided by once too often"
    if shards > 1:
        yield (
            [examples / size for size in sizes],
            f"divided by the {show_sizes(sizes)} examples of a shard, not by the {examples} of the"
            " batch",
        )
    yield [examples] * shards, f"not divided by the {examples} examples of the batch"
    yield (
        [1 / examples] * shards,
        f"divided twice by the {examples} examples of the batch",
    )


def show_sizes(sizes: Sequence[int]) -> str:
    """Returns the distinct sizes, largest first: "4 and 3"."""
    return " and ".join(map(str, sorted(set(sizes), reverse=True)))


def name_scaling(factor: float, split: Split, *, uncertainty: float) -> str:
    """Returns the cause of gradients that are too large by `factor`."""
    num_parts = split.shards_per_replica
    divided = num_parts > 1 and abs(factor * num_parts - 1) <= uncertainty
    return "divided_twice" if divided else "scaled_gradient"
