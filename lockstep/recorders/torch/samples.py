"""Takes samples of large tensors where they are, in chunks; see `numeric.sampling`."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lockstep.numeric.sampling import CHUNK, Indices, Sample
from lockstep.recorders.torch.values import to_array


def sample_of(
    sample: Sample, value: Tensor, shape: Sequence[int], part: Indices | None = None
) -> dict[str, np.ndarray]:
    """Returns what a file has of a tensor, or of a part of one; see `Sample.members`."""
    own = sample.select(shape, part)
    known = to_array(value[tuple(torch.from_numpy(along) for along in own.places)])
    elements = np.zeros(sample.elements, known.dtype)
    elements[own.is_here] = known
    return {"elements": elements, "sums": _sums(value, own.rows, own.columns)}


def _sums(value: Tensor, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Returns the sums with signs of rows `(K, n)` and columns `(K, …)`, then that of squares."""
    width = max(math.prod(value.shape[1:]), 1)
    of_rows = _as_float64(rows, value)
    total, squares = of_rows.new_zeros(len(rows), width), of_rows.new_zeros(())
    for start in range(0, len(value), max(CHUNK // width, 1)):
        chunk = value[start : start + max(CHUNK // width, 1)]
        chunk = chunk.reshape(len(chunk), width).double()
        total += of_rows[:, start : start + len(chunk)] @ chunk
        squares += chunk.square().sum()
    sums = (total * _as_float64(columns, value).reshape(len(rows), width)).sum(1)
    return to_array(torch.cat([sums, squares.reshape(1)]))


def rows_sampled(sample: Sample, value: Tensor) -> Tensor:
    """Returns samples of the rows of outputs: elements, then sums over √K, in the same dtype."""
    shape = value.shape[1:]
    if value.dim() < 2 or not sample.takes(shape):
        return value
    places = torch.from_numpy(sample.places(shape)).to(value.device)
    of_first, of_others = (_as_float64(signs, value) for signs in sample.signs(shape))
    of_others = of_others.reshape(sample.sums, -1)
    found = []
    for row in value:
        sums = (of_first @ row.reshape(shape[0], -1).double() * of_others).sum(1)
        known = row.reshape(-1)[places]
        found.append(torch.cat([known, (sums / sample.sums**0.5).to(known.dtype)]))
    return torch.stack(found) if found else value.new_zeros(0, sample.elements + sample.sums)


def _as_float64(signs: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(signs)).to(like.device, torch.float64)
