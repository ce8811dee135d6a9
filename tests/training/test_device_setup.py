"""Choosing devices: what the machine has is pretended."""

import json

import pytest
import tensorflow as tf

from app.devices import setup
from app.errors import DeviceError
from app.options import Config
from tests.conftest import CPUS, run_python

# Sets devices up as a program does, and prints what TensorFlow has then.
SCRIPT = """
import json, resource
from app.devices import setup
from app.options import Config
made = setup.set_up(Config.of(device="cpu"))
import keras
import tensorflow as tf
import numpy as np
from tensorflow.python.framework import test_util
def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(2**16) for _ in range(100)]  # 50 MiB, freed at the end.
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
page_faults()
print(json.dumps({
    "page_faults": page_faults(),
    "names": made.names,
    "simulated": made.simulated,
    "has_onednn": test_util.IsMklEnabled(),
    "logical": len(tf.config.list_logical_devices("CPU")),
    "intra": tf.config.threading.get_intra_op_parallelism_threads(),
    "keras": [keras.backend.backend(), keras.config.floatx(), keras.config.image_data_format()],
}))
"""


def test_without_a_gpu_two_logical_cpus_and_the_kernels_that_the_user_has_chosen(tmp_path):
    """Whatever a user's settings of Keras are."""
    (tmp_path / "keras.json").write_text(
        '{"floatx": "float64", "backend": "jax", "image_data_format": "channels_first"}'
    )
    env = {"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": "torch", "TF_ENABLE_ONEDNN_OPTS": "0"}
    result = run_python("-c", SCRIPT, env=env)
    done = json.loads(result.stdout)
    assert done["keras"] == ["tensorflow", "float32", "channels_last"]
    assert done["names"] == ["/device:CPU:0", "/device:CPU:1"]
    assert done["simulated"] and done["logical"] == 2 and done["intra"] >= 1
    assert not done["has_onednn"]
    assert done["page_faults"] < 1000  # 12,800 pages, which the process has kept.
    assert result.stderr == ""  # TensorFlow's own messages are held back.


@pytest.fixture
def machine(monkeypatch):
    """A machine with some GPUs, pretended; the function returns what it was set up to."""
    done = {"growth": 0, "logical": 0, "visible": [], "threads": []}

    def grow(gpu, on):
        done["growth"] += on

    def set_up(gpus_there, **options):
        gpus = [f"gpu{i}" for i in range(gpus_there)]
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind: gpus if kind == "GPU" else ["cpu0"]
        )
        return done, setup.set_up(Config.of(**options))

    for name, pretended in {
        "set_visible_devices": lambda chosen, kind: done.update(visible=chosen),
        "set_logical_device_configuration": lambda cpu, made: done.update(logical=len(made)),
        "experimental.set_memory_growth": grow,
        "threading.set_intra_op_parallelism_threads": done["threads"].append,
        "threading.set_inter_op_parallelism_threads": done["threads"].append,
    }.items():
        monkeypatch.setattr(f"tensorflow.config.{name}", pretended)
    return set_up


@pytest.mark.parametrize(
    ("gpus_there", "options", "names", "visible"),
    [
        (0, {"num_gpus": 3}, CPUS[:3], []),
        (2, {}, ["/device:GPU:0", "/device:GPU:1"], ["gpu0", "gpu1"]),
        (4, {"num_gpus": 2}, ["/device:GPU:0", "/device:GPU:1"], ["gpu0", "gpu1"]),
        (2, {"device": "cpu", "num_devices": 4}, CPUS, []),
    ],
)
def test_devices_that_are_taken(machine, capsys, gpus_there, options, names, visible):
    done, made = machine(gpus_there, **options)
    assert (made.names, done["visible"]) == (names, visible)
    assert (done["growth"], done["logical"]) == (len(visible), 0 if visible else len(names))
    assert visible or min(done["threads"]) >= 1
    assert made.simulated == (not visible)
    warning = "WARNING: 3 devices asked for, but this machine has no GPU"
    assert (warning in capsys.readouterr().err) == (options == {"num_gpus": 3})


@pytest.mark.parametrize(
    ("gpus_there", "options", "told"),
    [
        (0, {"device": "gpu"}, "--device=gpu: TensorFlow sees no GPU"),
        (1, {"num_gpus": 2}, "TensorFlow sees 1 GPU"),
        (1, {"num_devices": 3}, "--device=cpu --num_devices=3"),
    ],
)
def test_what_gpus_cannot_give_is_refused(machine, gpus_there, options, told):
    with pytest.raises(DeviceError, match=told) as refusal:
        machine(gpus_there, **options)
    assert refusal.value.exit_code == 6
