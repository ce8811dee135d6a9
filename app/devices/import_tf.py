"""Imports TensorFlow, with the settings of the program."""

import logging
import os
import pathlib
import platform
import tempfile
from typing import Any

from app import signals
from app.errors import DeviceError, reason_of


def import_tensorflow() -> Any:
    """Imports and returns TensorFlow, without messages and with the settings of the program."""
    os.environ["KERAS_BACKEND"] = "tensorflow"
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    if platform.machine() == "x86_64" and "avx2" in pathlib.Path("/proc/cpuinfo").read_text():
        # TensorFlow's default is for newer processors; it is faster here, too (docs/speed.md).
        os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")
    logging.getLogger("tensorflow").setLevel(logging.ERROR)
    saved = os.dup(2)  # Native code prints lines before it reads the log level.
    with tempfile.TemporaryFile() as held_back:
        os.dup2(held_back.fileno(), 2)
        try:
            import keras
            import tensorflow as tf

            keras.config.set_floatx("float32")  # A user's keras.json may change it.
            keras.config.set_image_data_format("channels_last")
            # TensorFlow would compute a chain of additions (a + b) + c with one `AddN`, in another
            # order: with three or more replicas, `manual` and `mirrored` would differ in the last
            # bit.
            tf.config.optimizer.set_experimental_options({"arithmetic_optimization": False})
        except Exception as error:
            signals.check()  # A signal may be why the import failed.
            held_back.seek(0)
            os.write(saved, held_back.read())
            raise DeviceError(
                f"TensorFlow cannot be loaded ({reason_of(error)}); install it again as in"
                " BUILD.md, or lift the memory limit"
            ) from error
        finally:
            os.dup2(saved, 2)
            os.close(saved)
    return tf
