"""Imports TensorFlow without what its Keras imports and the program uses late or not at all."""

import sys

_UNUSED = "matplotlib.pyplot"  # For Keras' galleries of images; it imports all of matplotlib.

_is_blocked = sys.modules.setdefault(_UNUSED, None) is None  # type: ignore[arg-type]
try:
    import tensorflow
finally:
    if _is_blocked:
        del sys.modules[_UNUSED]

__all__ = ["tensorflow"]
