"""Keras on one device and in three ways on two: `examples/keras_three_ways.py`, with its page."""

import gzip
import subprocess
import sys

import pytest

import lockstep
from tests.conftest import ROOT, idx_files
from tests.verifier.recorder_scripts import interpreter, run_script

SCRIPT = ROOT / "examples" / "keras_three_ways.py"
VARIABLES = {
    "KERAS_BACKEND": "jax", "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "JAX_PLATFORMS": "cpu",
}  # fmt: skip
HAS_KERAS = "import importlib.util as u; raise SystemExit(u.find_spec('keras') is None)"
# Prints the largest difference of a weight on two devices from one, or the error.
LAYERS = """
import keras, numpy as np
x = np.random.default_rng(0).normal(size=(96, 8)).astype("float32")
two = keras.distribution.DataParallel()
def train(build, devices, *, late=False, n=96, clipnorm=None, loss="mse"):
    keras.utils.set_random_seed(0)
    keras.distribution.set_distribution(None if late else devices)
    dense = keras.layers.Dense
    parts = [keras.Input((8,)), dense(16, activation="relu"), *build(), dense(1)]
    model = keras.Sequential(parts)
    model.compile(keras.optimizers.SGD(0.1, clipnorm=clipnorm), loss)
    keras.distribution.set_distribution(devices)
    model.fit(x[:n], x[:n, :1] * 2 + 1, 32, shuffle=False, verbose=0)
    return model.get_weights()
def scalar(y, p):
    return keras.ops.mean(keras.ops.square(y - p))
layers = keras.layers
for name, build, options in (
    ("BatchNormalization", lambda: [layers.BatchNormalization()], {}),
    ("Dropout", lambda: [layers.Dropout(0.5)], {}),
    ("clipnorm", list, {"clipnorm": 0.1}),
    ("scalar loss", list, {"loss": scalar}),
    ("late", list, {"late": True}),
    ("odd", list, {"n": 91}),
):
    try:
        each = [train(build, devices, **options) for devices in (None, two)]
        print(name, max(abs(a - b).max() for a, b in zip(*each)), sep=": ")
    except Exception as error:
        print(name, type(error).__name__, sep=": ")
"""


def has_keras_and_jax():
    """Returns whether the interpreter that has JAX has Keras, too."""
    python = interpreter("jax")
    return bool(python) and subprocess.run([python, "-c", HAS_KERAS]).returncode == 0


@pytest.fixture
def _examples(tmp_path, monkeypatch):
    for name, content in idx_files(num_train=768, num_test=1).items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content, 1))
    monkeypatch.setenv("FASHION_MNIST_DIR", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@pytest.mark.slow
@pytest.mark.usefixtures("_examples")
def test_three_ways_are_the_training_on_one_device():
    ways = {way: f"{sys.executable} {SCRIPT} {way}" for way in ("by_hand", "mirrored")}
    if has_keras_and_jax():
        variables = " ".join(f"{name}={value}" for name, value in VARIABLES.items())
        python = interpreter("jax")
        ways["data_parallel"] = f"env {variables} {python} {SCRIPT} data_parallel"
    lockstep.assert_same_training(f"{sys.executable} {SCRIPT} one_device", ways, steps=2)


@pytest.mark.slow
@pytest.mark.usefixtures("_examples")
def test_the_mean_of_each_shard_is_found(tmp_path):
    code, wrong = SCRIPT.read_text(encoding="utf-8"), tmp_path / "wrong.py"
    assert code.count("/ BATCH_SIZE\n") == 1
    wrong.write_text(code.replace("/ BATCH_SIZE\n", "/ len(x)\n"), encoding="utf-8")
    ways = {"by_hand": f"{sys.executable} {wrong} by_hand"}
    with pytest.raises(AssertionError, match="by_hand is not the reference training: wrong factor"):
        lockstep.assert_same_training(f"{sys.executable} {SCRIPT} one_device", ways, steps=1)


@pytest.mark.slow
def test_data_parallel_computes_what_one_device_does_or_fails():
    if not has_keras_and_jax():
        pytest.skip("needs an interpreter with keras and jax: LOCKSTEP_JAX_PYTHON")
    done = run_script("jax", "-c", LAYERS, **VARIABLES)
    assert done.returncode == 0, done.stderr
    *differences, late, odd = [line.split(": ") for line in done.stdout.splitlines()]
    assert len(differences) == 4 and all(float(number) < 1e-6 for _, number in differences)
    assert (late[1], odd[1]) == ("ValueError", "IndivisibleError")
