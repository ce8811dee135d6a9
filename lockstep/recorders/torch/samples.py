"""Takes samples of large tensors where they are, in chunks; see `numeric.sampling`."""

import functools
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
    own = sample.select(shape, part)
    known = to_array(value[tuple(torch.from_numpy(along) for along in own.places)])
    elements = np.zeros(sample.elements, known.dtype)
    elements[own.is_here] = known
    to_float64 = functools.partial(_as_float64, like=value)
    sums, squares = sums_of(value, own.rows, own.columns, to_float64)
    return {"/elements": elements, "/sums": np.append(to_array(sums), to_array(squares))}


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


def _as_float64(values: Any, like: Tensor) -> Tensor:
    tensor = values if isinstance(values, Tensor) else torch.tensor(values)
    return tensor.to(like.device, torch.float64)
