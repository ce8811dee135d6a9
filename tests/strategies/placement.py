"""Finds the devices on which a strategy places its variables."""

import keras


def short(device):
    """Returns "/device:CPU:1" for any name of that device."""
    return "/device:" + device.rpartition("device:")[2]


def devices_of_variables(variables):
    """Returns the devices of variables of TensorFlow or of Keras."""
    return {short((v.value if isinstance(v, keras.Variable) else v).device) for v in variables}
