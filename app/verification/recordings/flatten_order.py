"""Finds dense kernels with reordered rows, because channels are flattened first or last."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from app.verification.recordings.recorded_step import Named
from app.verification.recordings.step_pair import StepPair
from app.verification.recordings.trace_arrays import distance, norm

_MOST_CHANNELS = 4096
# A different loss scales the examples of a batch, so that rows agree only in their size.
_ALIKE, _MORE_ALIKE = 0.5, 0.3
_BY_CHANCE = 6  # Times 1 / sqrt(n), the standard deviation of a correlation of n random values.


def reordered_rows(
    pair: StepPair, first: Named, second: Named, wrong: Sequence[str], allowed: Callable
) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yields an explanation of different gradients by the order of the flattened axes.

    Rows of a dense kernel's gradient are equal in another order; or, if the kernel itself is not
    reordered and the loss differs, of similar size in that order.
    """
    layouts = {variable.name: variable.layout for variable in pair.first.trace.variables}
    for name in wrong:
        a, b = first[name], second[name]
        if a.ndim != 2:
            continue
        if layouts.get(name) == "OI":
            a, b = a.T, b.T
        sizes = np.linalg.norm(a, axis=1), np.linalg.norm(b, axis=1)
        direct = _correlation(*sizes)
        found = [
            (distance(b[order], a, max(norm(a), 1e-30)), _correlation(sizes[0], sizes[1][order]), n)
            for n, order in _orders(len(a))
        ]
        if not found:
            continue
        far, alike, channels = min(found, key=lambda each: (each[0] > 4 * allowed(name), -each[1]))
        least = max(_ALIKE, _BY_CHANCE / len(a) ** 0.5, direct + _MORE_ALIKE)
        if far <= 4 * allowed(name) or alike > least:
            yield (
                "flatten_order",
                f"the inputs of {name} are in another order: {channels} channels are flattened"
                " first in one script and last in the other",
                [name],
            )
            return


def _orders(count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Yields numbers of channels, and the row order with the channels on the other side."""
    rows = np.arange(count)
    for channels in range(2, min(count, _MOST_CHANNELS)):
        if count % channels == 0:
            yield channels, rows.reshape(channels, -1).T.ravel()
            yield channels, rows.reshape(-1, channels).T.ravel()


def _correlation(first: np.ndarray, second: np.ndarray) -> float:
    a, b = (array - array.mean() for array in (first.astype(np.float64), second))
    size = norm(a) * norm(b)
    return float(a @ b) / size if size else 0.0
