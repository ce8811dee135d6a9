"""Finds the labels of images, for recordings without labels."""

from collections import defaultdict, deque
from collections.abc import Iterable

import numpy as np

_NO_LABEL = 255  # Of an image that is not in the training set.

Labels = dict[bytes, deque[int]]


class ImageLabels:
    """Finds labels by the bytes of an image.

    Args:
        images: uint8 `(n, height, width, channels)`, the training set.
        labels: integers `(n,)`.
    """

    def __init__(self, images: np.ndarray, labels: np.ndarray):
        self._all = _labels_of(images, labels)

    def of_batch(self, shards: Iterable[np.ndarray], batch: tuple) -> list[np.ndarray]:
        """Returns the labels `(n,)` of the images of each shard.

        Labels of an image that occurs several times with different labels are returned in their
        order.

        Args:
            shards: images of each shard.
            batch: images and labels of the global batch.
        """
        in_batch = _labels_of(*batch)
        return [
            np.array([self._next(image.tobytes(), in_batch) for image in images], np.int64)
            for images in shards
        ]

    def _next(self, image: bytes, in_batch: Labels) -> int:
        found = in_batch.get(image) or self._all.get(image)
        if not found:
            return _NO_LABEL
        found.rotate(-1)
        return found[-1]


def _labels_of(images: np.ndarray, labels: np.ndarray) -> Labels:
    found: Labels = defaultdict(deque)
    for image, label in zip(images, labels, strict=True):
        found[image.tobytes()].append(int(label))
    return found
