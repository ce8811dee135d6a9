"""The results that "Dive into Deep Learning" prints, for comparison."""

from typing import NamedTuple


class Figure(NamedTuple):
    """A result that d2l prints for a training of ten epochs, on its authors' GPUs.

    Attributes:
        model: a key of `models.MODELS`.
        program: which of d2l's programs.
        num_gpus: number of GPUs.
        accuracy: test accuracy, a fraction.
        epoch_sec: seconds per epoch.
    """

    model: str
    program: str
    num_gpus: int
    accuracy: float
    epoch_sec: float


# Sections "Training on Multiple GPUs" and "Concise Implementation for Multiple GPUs".
FIGURES = (
    Figure("lenet", "TensorFlow, by hand", 1, 0.84, 2.5),
    Figure("lenet", "TensorFlow, by hand", 2, 0.84, 5.1),
    Figure("lenet", "JAX, pmap", 1, 0.84, 0.9),
    Figure("lenet", "JAX, pmap", 2, 0.85, 1.3),
    Figure("resnet18", "PyTorch, DataParallel", 1, 0.84, 5.9),
    Figure("resnet18", "PyTorch, DataParallel", 2, 0.87, 8.7),
    Figure("resnet18", "MXNet, Gluon", 1, 0.93, 6.4),
    Figure("resnet18", "MXNet, Gluon", 2, 0.92, 3.7),
)
EPOCHS = 10
