"""Defines the dataset of a run."""

import dataclasses
import hashlib

import numpy as np

CLASS_NAMES = (
    "t-shirt", "trouser", "pullover", "dress", "coat",
    "sandal", "shirt", "sneaker", "bag", "ankle boot",
)  # fmt: skip
NUM_CLASSES = len(CLASS_NAMES)
IMAGE_SHAPE = (28, 28, 1)


@dataclasses.dataclass(frozen=True)
class ImageDataset:
    """Training and test images of ten classes.

    Attributes:
        name: "fashion_mnist", "synthetic", or "unverified" for files in Fashion-MNIST's format
            with other content; shown in plots and files.
        train_images: uint8 `(N, 28, 28, 1)`.
        train_labels: uint8 `(N,)`, in 0 to 9.
        test_images: uint8 `(M, 28, 28, 1)`.
        test_labels: uint8 `(M,)`, in 0 to 9.
    """

    name: str
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray

    @property
    def num_train_examples(self) -> int:
        """Number of training images."""
        return len(self.train_images)

    @property
    def num_test_examples(self) -> int:
        """Number of test images."""
        return len(self.test_images)

    def sha256(self) -> str:
        """Returns a hash of all images and labels, in order."""
        return _sha256(self.train_images, self.train_labels, self.test_images, self.test_labels)

    def sha256_of_test_part(self) -> str:
        """Returns a hash of the test images and labels."""
        return _sha256(self.test_images, self.test_labels)

    def with_train_subset(self, num_examples: int, seed: int) -> "ImageDataset":
        """Returns the dataset with `num_examples` training images, equally many per class.

        If they do not divide evenly, the first classes have one more. The order of the dataset is
        kept. The choice is a pure function of (seed, labels).
        """
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(self.train_labels))
        shuffled = self.train_labels[order]
        # Choose the examples in rounds, one of each class per round.
        rounds = np.empty(len(order), np.int64)
        for label in range(NUM_CLASSES):
            members = shuffled == label
            rounds[members] = np.arange(members.sum())
        dealt = order[np.lexsort((shuffled, rounds))]
        chosen = np.sort(dealt[:num_examples])
        return dataclasses.replace(
            self, train_images=self.train_images[chosen], train_labels=self.train_labels[chosen]
        )


def _sha256(*arrays: np.ndarray) -> str:
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
