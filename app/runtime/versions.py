"""Returns the versions of the software that affects the results."""

import platform

import keras
import numpy as np
import tensorflow as tf


def versions() -> dict[str, str]:
    """Returns name → version."""
    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
    }
