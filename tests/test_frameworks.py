"""LeNet in PyTorch and JAX, on the batches of a recording; needs interpreters that have them."""

import os
import subprocess

import numpy as np
import pytest

from app.records.script_trace import load_trace
from app.verification.recordings.trace_verification import given_tolerance, verify_against
from conftest import ROOT

PROGRAMS = {
    "torch": ("LOCKSTEP_TORCH_PYTHON", ["torch_lenet.py", "--processes=2"]),
    "jit": ("LOCKSTEP_JAX_PYTHON", ["jax_lenet.py", "--mode=jit"]),
    "pmap": ("LOCKSTEP_JAX_PYTHON", ["jax_lenet.py", "--mode=pmap"]),
}


@pytest.fixture(scope="module")
def lenet(tmp_path_factory):
    """Records two steps of LeNet with Keras on generated images; returns the file."""
    import keras
    import tensorflow as tf

    from models.lenet import build_lenet
    from recorders import lockstep_keras

    keras.utils.set_random_seed(1)
    network = build_lenet(image_shape=(28, 28, 1), num_classes=10)
    scaled = keras.Sequential([keras.layers.Rescaling(1 / 255), network])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    scaled.compile(keras.optimizers.SGD(0.2), loss=loss)
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (64, 28, 28, 1)).astype(np.uint8)
    batches = tf.data.Dataset.from_tensor_slices((images, generator.integers(0, 10, 64))).batch(32)
    path = tmp_path_factory.mktemp("lenet") / "keras.npz"
    with lockstep_keras.record(str(path), scaled, steps=2):
        scaled.fit(batches, verbose=0)
    return path


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_lenet_in_another_framework(lenet, tmp_path, name):
    variable, program = PROGRAMS[name]
    if not (python := os.environ.get(variable)):
        pytest.skip(f"{variable} names no interpreter")
    command = [python, *program, "--recorded_steps=2", f"--replay={lenet}"]
    command += [f"--trace={tmp_path / 'o.npz'}"]
    command[1] = str(ROOT / "frameworks" / command[1])
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    first, other = load_trace(lenet), load_trace(tmp_path / "o.npz")
    report = verify_against(first, other, {}, given_tolerance(None))
    assert report.findings == [] and report.skipped == ()
    assert report.stages["gradients"] == report.stages["update"] == "clean"
    assert other.num_replicas == 2
