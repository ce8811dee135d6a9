"""Examples whose targets belong to other inputs."""

from collections.abc import Iterator

import numpy as np

from .one_device import OneDevice
from .recorder_imports import Arrays, leaves


def with_shifted_targets(one: OneDevice, data: Arrays) -> Iterator[Arrays]:
    """Yields examples with their targets shifted by one example, in both directions."""
    inputs = len(leaves(one.unpack(data)[0]))
    for shift in (1, -1):
        yield data[:inputs] + [np.roll(array, shift, axis=0) for array in data[inputs:]]
