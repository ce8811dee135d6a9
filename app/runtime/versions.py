"""Returns the versions of the software that affects the results."""

import platform

import numpy as np


def versions() -> dict[str, str]:
    """Returns name → version; imports TensorFlow and Keras."""
    import keras
    import tensorflow as tf

    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
    }
