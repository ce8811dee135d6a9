"""Records what a Keras training computes; `lockstep.record_keras` has the public names."""

import keras

from lockstep.recorders.common import check_version

check_version("record_keras", "Keras", keras.__version__, (3, 6))
if keras.backend.backend() != "tensorflow":
    raise ImportError(
        f"record_keras records Keras on TensorFlow, and the backend is {keras.backend.backend()};"
        " set KERAS_BACKEND=tensorflow, or record a loop of your own with record_jax or"
        " record_torch"
    )
