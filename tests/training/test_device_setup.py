"""Choosing devices: what the machine has is pretended."""

import json
import subprocess
import sys
import time

import pytest
import tensorflow as tf

from app.devices import device_setup, gpus
from app.options import Config
from app.runtime import kernels
from app.runtime.errors import DeviceError
from tests.conftest import CPUS, ROOT, program_environment, run_python
from tests.in_process import threads_as_processes

# Sets devices up as a program does, and prints what TensorFlow has then.
SCRIPT = """
import json, resource
from app.devices import device_setup
from app.options import Config
made = device_setup.set_up(Config.of(device="cpu"))
import keras
import tensorflow as tf
import numpy as np
from strategies.tf_private import is_onednn_enabled
def page_faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    arrays = [np.ones(2**16) for _ in range(100)]  # 50 MiB, freed at the end.
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
page_faults()
print(json.dumps({
    "page_faults": page_faults(),
    "names": made.names,
    "simulated": made.simulated,
    "has_onednn": is_onednn_enabled(),
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
    env = {"KERAS_HOME": str(tmp_path), "KERAS_BACKEND": "torch", kernels.VARIABLE: "0"}
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
    """Pretends that TensorFlow has used no device yet; the function sets up as with some GPUs."""
    done = {"growth": 0, "threads": []}

    def grow(gpu, on):
        assert on
        done["growth"] += 1

    def set_up(gpus_there, **options):
        gpus = [f"gpu{i}" for i in range(gpus_there)]
        monkeypatch.setattr(
            tf.config, "list_physical_devices", lambda kind: gpus if kind == "GPU" else ["cpu0"]
        )
        try:
            made = device_setup.set_up(Config.of(**options))
        except DeviceError as error:
            return done | {"error": str(error), "code": error.exit_code}
        return done | {"names": made.names, "simulated": made.simulated}

    for name, pretended in {
        "set_visible_devices": lambda chosen, kind: done.update(visible=chosen),
        "set_logical_device_configuration": lambda cpu, made: done.update(logical=len(made)),
        "experimental.set_memory_growth": grow,
        "threading.set_intra_op_parallelism_threads": done["threads"].append,
        "threading.set_inter_op_parallelism_threads": done["threads"].append,
    }.items():
        monkeypatch.setattr(f"tensorflow.config.{name}", pretended)
    monkeypatch.setattr(device_setup, "why_no_gpu", lambda: "no driver: install one")
    with threads_as_processes():
        yield set_up


@pytest.mark.parametrize(
    ("gpus_there", "options", "names", "visible"),
    [
        (0, {"strategy": "single"}, CPUS[:1], []),
        (0, {"num_gpus": 3}, CPUS[:3], []),
        (2, {}, ["/device:GPU:0", "/device:GPU:1"], ["gpu0", "gpu1"]),
        (4, {"num_gpus": 2}, ["/device:GPU:0", "/device:GPU:1"], ["gpu0", "gpu1"]),
        (2, {"device": "cpu", "num_devices": 4}, CPUS, []),
    ],
)
def test_devices_that_are_taken(machine, capsys, gpus_there, options, names, visible):
    done = machine(gpus_there, **options)
    assert (done["names"], done.get("visible", [])) == (names, visible)
    assert done["growth"] == len(visible)
    assert done.get("logical", 0) == (0 if visible else len(names))
    assert visible or min(done["threads"]) >= 1
    assert done["simulated"] == (len(names) > 1 and not visible)
    warning = "WARNING: --num_gpus=3, but this machine has no GPU"
    assert (warning in capsys.readouterr().err) == (options == {"num_gpus": 3})


@pytest.mark.parametrize(
    ("gpus_there", "options", "told"),
    [
        (0, {"device": "gpu"}, "no GPU (no driver: install one); use --device=cpu --num_devices=2"),
        (1, {"num_gpus": 2}, "TensorFlow sees 1 GPU"),
        (1, {"num_devices": 3}, "--device=cpu --num_devices=3"),
    ],
)
def test_what_gpus_cannot_give_is_refused(machine, gpus_there, options, told):
    done = machine(gpus_there, **options)
    assert done["code"] == 6 and told in done["error"]


DRIVER = "echo 'A, 24564 MiB, 550.54.14'"
NO_LIBRARY = "Could not load dynamic library 'libcudnn.so.9'; dlerror\nis_cuda_build True"
NO_CUDA = "failed call to cuInit: CUDA_ERROR_X\nis_cuda_build False"


@pytest.mark.parametrize(
    ("smi", "log", "visible", "causes"),
    [
        ("", NO_LIBRARY, "-1", ["hides every GPU", "nvidia-smi is not", "cannot load libcudnn"]),
        ("echo no contact; exit 9", NO_CUDA, None, ["nvidia-smi: no", "has no CUDA", "cuInit fa"]),
        (DRIVER, "", None, []),
    ],
)
def test_what_keeps_tensorflow_from_gpus(tmp_path, monkeypatch, smi, log, visible, causes):
    if smi:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/bash\n{smi}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setattr(gpus, "_tensorflow_log", lambda: log)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = gpus.gpu_obstacles()
    for (cause, advice), part in zip(found, causes, strict=True):
        assert part in cause and advice
    told = gpus.why_no_gpu()
    assert "; " not in told and (causes[0] in told if causes else "--verbosity=1" in told)


@pytest.mark.slow
def test_tensorflow_s_log_names_libraries_that_it_cannot_load():
    told = "is_cuda_build True" if gpus.query_driver()[0] else "library 'libcuda.so.1'"
    assert told in gpus._tensorflow_log()


def test_a_process_that_has_its_devices_already_gives_no_more():
    """This one has four, which are fixed from here on."""
    tf.config.list_logical_devices()
    told = "5 CPU devices requested, but this process has 4 CPU devices .*; use a new process"
    with pytest.raises(DeviceError, match=told):
        device_setup.set_up(Config.of(device="cpu", num_devices=5))


def test_a_signal_while_tensorflow_is_imported_has_its_line(tmp_path):
    """Standard error is redirected meanwhile."""
    (tmp_path / "tensorflow.py").write_text(
        f"import pathlib, time; pathlib.Path({str(tmp_path / 'begun')!r}).touch(); time.sleep(60)"
    )
    with subprocess.Popen(
        [sys.executable, ROOT / "main.py", "--dataset=synthetic", f"--out={tmp_path}/run"],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        env=program_environment(PYTHONPATH=str(tmp_path)),
    ) as process:  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while not (tmp_path / "begun").exists():
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.05)
            process.terminate()
            errors = process.communicate(timeout=30)[1]
        finally:
            process.kill()
    assert process.returncode == 143
    assert errors.splitlines()[-1].startswith("terminated; no state is saved yet")
