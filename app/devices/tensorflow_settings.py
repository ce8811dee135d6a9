"""Imports TensorFlow, and changes settings of it and of Keras."""

import logging
import os
import sys
import tempfile
from typing import Any

from app.runtime import signals
from app.runtime.errors import DeviceError, reason_of

_NO_REWRITE = "arithmetic_optimization"
_UNUSED = "matplotlib.pyplot"  # For Keras' galleries of images; it imports all of matplotlib.


def import_tensorflow(verbosity: int) -> Any:
    """Imports and returns TensorFlow, with its messages suppressed unless `verbosity` >= 0.

    Its native code reads the environment once, after it has printed some lines. Standard error is
    therefore redirected to a file during the import, and printed only if the import fails.

    Raises:
        DeviceError: TensorFlow cannot be loaded.
    """
    os.environ["KERAS_BACKEND"] = "tensorflow"
    try:
        return _import_quietly(verbosity)
    except ImportError as error:
        raise DeviceError(
            f"TensorFlow cannot be loaded ({reason_of(error)}); install it again as in"
            " BUILD.md, or lift the memory limit"
        ) from error


def _import_quietly(verbosity: int) -> Any:
    if verbosity >= 0:
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "0" if verbosity > 0 else "1")
        return _import_needed()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    saved = os.dup(2)
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            return _import_needed()
        except Exception:
            signals.check()  # A signal may be why the import failed.
            held_back.seek(0)
            os.write(saved, held_back.read())
            raise
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _import_needed() -> Any:
    """Imports TensorFlow without what its Keras imports and the program uses late or not at all."""
    is_blocked = sys.modules.setdefault(_UNUSED, None) is None  # type: ignore[arg-type]
    try:
        import tensorflow

        return tensorflow
    finally:
        if is_blocked:
            del sys.modules[_UNUSED]


def settle_keras() -> None:
    """Sets the Keras settings that the models rely on, which a user's keras.json may change."""
    import keras

    keras.config.set_floatx("float32")
    keras.config.set_image_data_format("channels_last")


def keep_order_of_summation() -> None:
    """Disables TensorFlow's rewriting of sums, so that (a + b) + c is computed as written.

    The graph optimizer replaces a chain of additions with one `AddN`, which adds in another order:
    with three or more replicas, the gradients of `manual` and `mirrored` would differ in the last
    bit.
    Measured: the time of an epoch does not change.
    """
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({_NO_REWRITE: False})
