"""Shifts targets relative to inputs."""

from collections.abc import Iterator

import numpy as np

from .recorder_imports import Arrays, leaves
from .reference_model import OneDevice


def with_shifted_targets(one: OneDevice, data: Arrays) -> Iterator[Arrays]:
    """Yields examples with their targets shifted by one example, in both directions."""
    inputs = len(leaves(one.unpack(data)[0]))
    for shift in (1, -1):
        yield data[:inputs] + [np.roll(array, shift, axis=0) for array in data[inputs:]]
