"""The programs of `docs/exercises.md`; its commands are run by `test_docs`."""

import importlib
import re

import numpy as np
import pytest
import tensorflow as tf

from tests.conftest import CPUS, ROOT, assert_ok, run_python
from tests.verifier.recorder_scripts import needs, run_script

PAGE = (ROOT / "docs" / "exercises.md").read_text(encoding="utf-8")


def test_unequal_shards_on_unequal_devices_are_the_training_on_one_device(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    data_parallel = importlib.import_module("data_parallel")
    unequal_devices = importlib.import_module("unequal_devices")
    random = np.random.default_rng(0)
    images = tf.constant(random.integers(0, 256, (256, 28, 28, 1), dtype=np.uint8))
    labels = tf.constant(random.integers(0, 10, 256, dtype=np.int32))
    start = [tf.Variable(value) for value in data_parallel.initial_values()]
    right = data_parallel.local_gradients(start, images, labels, 256)
    for sizes in unequal_devices.SHARDS.values():
        params, train_batch = unequal_devices.create(sizes, CPUS[:2], slower=2)
        train_batch(images, labels)
        for param, value, gradient in zip(params, start, right, strict=True):
            moved = (value - param) / data_parallel.LEARNING_RATE
            assert np.any(moved) or not np.any(gradient)
            np.testing.assert_allclose(moved, gradient, rtol=1e-3, atol=1e-6)


@needs("jax")
def test_pmap_and_vmap_compute_the_same_gradients():
    flags = "--xla_force_host_platform_device_count=2"
    done = assert_ok(run_script("jax", ROOT / "examples" / "pmap_vmap.py", XLA_FLAGS=flags))
    *devices, shards, mean = done.stdout.splitlines()
    assert devices == [
        f"{name}: gradients on {n} of 2 devices" for n, name in ((1, "vmap"), (2, "pmap"))
    ]
    for line in (shards, mean):
        assert float(re.search(r"at most (\S+) apart", line)[1]) < 1e-7


@needs("jax")
def test_steps_return_before_they_are_computed():
    done = assert_ok(run_script("jax", ROOT / "examples" / "without_waiting.py"))
    *ways, same = done.stdout.splitlines()
    (returned, there), (waited, last), _ = (re.findall(r"\d+\.\d", line) for line in ways)
    assert float(returned) < float(there) / 2 and float(waited) > float(last) * 0.9
    assert same == "same weights: True"


@pytest.mark.slow
def test_compile_outside_of_the_scope_does_what_the_page_says():
    ((code, shown),) = re.findall(r"```python\n(.*?)```\n\n```text\n(.*?)```", PAGE, re.DOTALL)
    assert assert_ok(run_python("-c", code, cwd=ROOT)).stdout == shown
