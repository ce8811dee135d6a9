"""Returns the versions of the software that affects the results, and the kernels of the CPU."""

import platform

import numpy as np

from app.runtime.kernels import describe_kernels

CPU_KERNELS = "cpu_kernels"  # A key that files of version 1.0.0 lack.
NOT_RECORDED = "not recorded"
KERNELS_CHANGED = "kernels of the CPU: "  # Begins the line of a run that resumed with others.


def versions() -> dict[str, str]:
    """Returns name → version, and `CPU_KERNELS` → kernels; imports TensorFlow and Keras."""
    import keras
    import tensorflow as tf

    from strategies.tf_private import is_onednn_enabled

    return {
        "python": platform.python_version(),
        "tensorflow": tf.__version__,
        "keras": keras.__version__,
        "numpy": np.__version__,
        CPU_KERNELS: describe_kernels(is_onednn_enabled()),
    }
