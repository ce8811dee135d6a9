"""Takes samples of large tensors where they are, in chunks; see `numeric.sampling`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.numeric.sampling import Indices, Sample, sums_of
from lockstep.recorders.torch.values import to_array


def sample_of(
    sample: Sample, value: Tensor, shape: Sequence[int], part: Indices | None = None
) -> dict[str, np.ndarray]:
    """Returns what a file has of a tensor, or of a part of one, by the ends of its names.

    See `Sample.members`.
    """

    def to_float64(values: Any) -> Tensor:
        return torch.as_tensor(values).to(value.device, torch.float64)

    own = sample.select(shape, part)
    known = to_array(value[tuple(torch.from_numpy(along) for along in own.places)])
    elements = np.zeros(sample.elements, known.dtype)
    elements[own.is_here] = known
    sums, squares = sums_of(value, own.rows, own.columns, to_float64)
    return {"/elements": elements, "/sums": np.append(to_array(sums), to_array(squares))}


def rows_sampled(sample: Sample, value: Tensor) -> np.ndarray:
    """Returns samples of the rows of outputs, where these are long; see `Sample.of_rows`."""
    if value.dim() < 2 or not len(value) or not sample.takes(value.shape[1:]):
        return to_array(value)
    rows = [sample_of(sample, row, row.shape) for row in value]
    found = [np.append(x["/elements"], x["/sums"][:-1] / sample.sums**0.5) for x in rows]
    return np.stack(found).astype(rows[0]["/elements"].dtype)
