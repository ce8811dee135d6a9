"""Choosing devices: what the machine has is pretended."""

import pytest
import tensorflow as tf

from app.devices import setup
from app.errors import DeviceError
from app.options import Config
from tests.conftest import CPUS

GPUS = ["/device:GPU:0", "/device:GPU:1"]


@pytest.fixture
def done(monkeypatch):
    """What TensorFlow, which has used no device yet, is set up to."""
    done = {"visible": [], "growth": [], "logical": []}
    for name, pretended in {
        "set_visible_devices": lambda chosen, kind: done.update(visible=chosen),
        "set_logical_device_configuration": lambda cpu, made: done.update(logical=made),
        "experimental.set_memory_growth": lambda gpu, on: done["growth"].append(gpu),
        "threading.set_intra_op_parallelism_threads": lambda number: None,
        "threading.set_inter_op_parallelism_threads": lambda number: None,
    }.items():
        monkeypatch.setattr(f"tensorflow.config.{name}", pretended)
    return done


# GPUs of the machine, options, names of the devices or the reason of a refusal.
@pytest.mark.parametrize(
    ("num_gpus", "options", "expected"),
    [
        (2, {}, GPUS),
        (4, {"num_gpus": 2}, GPUS),
        (2, {"device": "cpu", "num_devices": 4}, CPUS),
        (0, {"num_gpus": 3}, CPUS[:3]),
        (1, {"num_gpus": 2}, "TensorFlow sees 1 GPU"),
        (1, {"num_devices": 3}, "--device=cpu --num_devices=3"),
    ],
)
def test_the_devices_that_a_machine_has(done, monkeypatch, num_gpus, options, expected):
    gpus = [f"gpu{index}" for index in range(num_gpus)]
    monkeypatch.setattr(
        tf.config, "list_physical_devices", lambda kind: gpus if kind == "GPU" else ["cpu0"]
    )
    if isinstance(expected, str):
        with pytest.raises(DeviceError, match=expected) as refusal:
            setup.set_up(Config.of(**options))
        assert refusal.value.exit_code == 6
        return
    made, is_gpu = setup.set_up(Config.of(**options)), expected == GPUS
    assert (made.names, made.simulated) == (expected, not is_gpu)
    assert done["visible"] == done["growth"] == (gpus[:2] if is_gpu else [])
    assert len(done["logical"]) == (0 if is_gpu else len(expected))
