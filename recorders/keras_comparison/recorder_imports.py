"""Imports the recorder, beside this folder in a user's script or in the same package."""

from typing import TYPE_CHECKING

if TYPE_CHECKING or "." in (__package__ or ""):
    from ..lockstep_keras import (
        Arrays,
        Hooks,
        Recording,
        Sparse,
        inner_optimizer,
        is_float,
        leaves,
        regularisation,
        to_numpy_dtype,
    )
else:
    from lockstep_keras import (
        Arrays,
        Hooks,
        Recording,
        Sparse,
        inner_optimizer,
        is_float,
        leaves,
        regularisation,
        to_numpy_dtype,
    )

__all__ = [
    "Arrays",
    "Hooks",
    "Recording",
    "Sparse",
    "inner_optimizer",
    "is_float",
    "leaves",
    "regularisation",
    "to_numpy_dtype",
]
