"""Memory: what does not fit is refused before the first step, with a batch that does."""

import re

import keras
import pytest

from app import memory
from app.errors import DeviceError, is_out_of_memory
from models import MODELS
from small_models import small_network

GIB = 2**30


def test_an_estimate_counts_layers_and_copies():
    estimate = memory.MemoryEstimate.of(small_network())
    # Rescaling 784, convolution 3 · 6 · 6, the same flattened, ten logits; all float32.
    computed_bytes = 4 * (784 + 108 + 108 + 10)
    parameters = 3 * 25 + 3 + 108 * 10 + 10
    assert estimate == (12 * parameters, round(0.5 * computed_bytes), round(1.6 * computed_bytes))


def test_half_precision_takes_half(monkeypatch):
    whole = memory.MemoryEstimate.of(small_network())
    monkeypatch.setattr(keras.config, "dtype_policy", lambda: keras.DTypePolicy("mixed_bfloat16"))
    half = memory.MemoryEstimate.of(small_network())
    assert half.low_bytes == pytest.approx(whole.low_bytes / 2, abs=1)
    assert half.fixed_bytes == whole.fixed_bytes


def test_a_batch_that_cannot_fit_is_refused_with_one_that_can():
    model = MODELS["resnet18"]()
    with pytest.raises(
        DeviceError, match=r"60000, which is 30,000 images on each of 2 rep"
    ) as told:
        memory.check_memory(model, num_replicas=2, global_batch_size=60_000, available=16 * GIB)
    assert "16.0 are free" in str(told.value)
    fits = int(re.search(r"use --global_batch_size=(\d+)", str(told.value))[1])
    assert 100 < fits < 10_000 and fits % 2 == 0
    memory.check_memory(model, num_replicas=2, global_batch_size=fits, available=16 * GIB)


def test_without_a_number_nothing_is_refused():
    memory.check_memory(small_network(), num_replicas=1, global_batch_size=60_000, available=None)


def test_memory_of_this_machine_is_found():
    assert 100 << 20 < memory.available_bytes() < 100 << 40


def test_what_says_that_memory_ran_out():
    import tensorflow as tf

    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(tf.errors.ResourceExhaustedError(None, None, "OOM"))
    assert not is_out_of_memory(RuntimeError("OOM"))


def test_a_container_s_limit_counts_and_its_cached_files_do_not(monkeypatch):
    """Files of a control group as Linux has them."""
    files = {
        "/proc/meminfo": "MemTotal: 9000 kB\nMemAvailable: 8000 kB\nSwapFree: 0 kB\n",
        "/sys/fs/cgroup/memory.max": "5000000\n",
        "/sys/fs/cgroup/memory.current": "4000000\n",
        "/sys/fs/cgroup/memory.stat": "anon 5\ninactive_file 300000\nactive_file 200000\n",
    }

    def read(path):
        if path not in files:
            raise FileNotFoundError(path)
        return files[path]

    monkeypatch.setattr(memory, "_read", read)
    assert memory.available_bytes() == 1_500_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert memory.available_bytes() == 8000 * 1024
    files.clear()
    assert memory.available_bytes() is None
