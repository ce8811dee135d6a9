"""Tests the memory estimate: batches that do not fit are rejected, with a batch size that does."""

import errno
import re
import subprocess
import sys

import keras
import pytest

from app.config import Config
from app.devices import free_memory
from app.runtime.errors import DeviceError, DiskFullError, is_out_of_memory, out_of_memory
from app.training import memory_estimate
from app.training.memory_estimate import StepSize
from app.training.tensor_lifetimes import live_tensors_in_step
from conftest import ROOT
from small_models import build_network, small_network

GIB = 2**30


def test_the_worst_moment_of_a_step_small_enough_to_count_by_hand():
    """One product: in the forward pass images as numbers; then the weight's gradient."""
    images = keras.Input((28, 28, 1), dtype="uint8")
    scaled = keras.layers.Rescaling(1 / 255)(images)
    logits = keras.layers.Dense(10, use_bias=False)(keras.layers.Flatten()(scaled))
    alive = live_tensors_in_step(keras.Model(images, logits))
    assert 4 * (784 + 10) <= alive.image_bytes <= 4 * (2 * 784 + 40)
    assert alive.fixed_bytes <= 4 * 7840 + 1000


def test_it_grows_with_the_layers_and_the_gradients_are_in_it():
    small, large = (
        live_tensors_in_step(build_network("lenet")),
        live_tensors_in_step(build_network("resnet18")),
    )
    assert 100_000 < small.image_bytes < 250_000  # A batch of 4,096 was seen to take 0.7 GB.
    assert 2_500_000 < large.image_bytes < 4_500_000  # And one of 256 1.0 GB.


def test_an_estimate_has_weights_and_what_the_optimizer_keeps():
    model, optimizer = small_network(), keras.optimizers.SGD(0.1, momentum=0.9)
    optimizer.build(model.trainable_variables)
    estimate = memory_estimate.MemoryEstimate.of(model, optimizer.variables)
    parameters = 3 * 25 + 3 + 108 * 10 + 10
    assert estimate.weights_bytes == 4 * parameters
    assert 4 * parameters <= estimate.optimizer_state_bytes < 4 * parameters + 100
    total = estimate.total_bytes(StepSize(2, 2, 10))
    state_bytes = estimate.weights_bytes + estimate.optimizer_state_bytes
    fixed = 2 * (state_bytes + estimate.step_bytes)
    assert total == pytest.approx(fixed + 10 * estimate.image_bytes)
    # One copy of the weights whose gradients are computed on four replicas.
    fixed = state_bytes + 4 * estimate.step_bytes
    assert estimate.total_bytes(StepSize(1, 4, 10)) == pytest.approx(
        fixed + 10 * estimate.image_bytes
    )


def test_a_step_is_as_large_as_the_strategy_makes_it():
    def size(num_devices, **options):
        return StepSize.of(Config.of(**options), num_devices, 64)

    assert size(2) == StepSize(2, 2, 64, 2)
    assert size(1, strategy="single", accumulate_steps=4) == StepSize(1, 1, 64, 1, 1 / 4)
    # Each device has its part of the weights, and all of them besides, if only in a step.
    assert size(3, strategy="sharded") == StepSize(4, 3, 64, 1)
    assert size(3, strategy="sharded", shard="optimizer") == StepSize(4, 3, 64, 1)
    assert size(2, strategy="tensor") == StepSize(1, 1, 64, 1)
    assert size(4, strategy="pipeline", model_parallel=2, schedule="gpipe") == StepSize(2, 2, 64, 2)
    assert size(2, strategy="pipeline") == StepSize(1, 1, 64, 1, 3 / 8)


def test_a_model_without_values_is_estimated_like_any_other():
    """Of a split model each device has a part, and the whole has none."""
    whole, split = small_network(), small_network()
    for variable in split.variables:
        variable._value = None
    estimates = [memory_estimate.MemoryEstimate.of(model) for model in (whole, split)]
    assert estimates[0] == estimates[1]


def test_half_precision_takes_about_half():
    whole = memory_estimate.MemoryEstimate.of(build_network("lenet"))
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        half = memory_estimate.MemoryEstimate.of(build_network("lenet"))
    finally:
        keras.config.set_dtype_policy("float32")
    assert 0.45 < half.image_bytes / whole.image_bytes < 0.65
    assert half.weights_bytes == whole.weights_bytes


def test_the_bound_that_spares_the_estimate_is_above_it():
    for build in (small_network, lambda: build_network("lenet"), lambda: build_network("resnet18")):
        model = build()
        size = StepSize(2, 2, 64)
        needed = memory_estimate.MemoryEstimate.of(model).total_bytes(size)
        assert memory_estimate._upper_bound(model, size) > needed


def test_a_batch_that_cannot_fit_is_refused_with_one_that_can():
    model, optimizer = build_network("resnet18"), keras.optimizers.SGD()
    optimizer.build(model.trainable_variables)
    state = optimizer.variables
    with pytest.raises(
        DeviceError, match=r"60000, which is 30,000 images on each of 2 rep"
    ) as told:
        memory_estimate.check_memory(model, state, StepSize(2, 2, 60_000), available=16 * GIB)
    assert " GiB, 16.0 are free" in str(told.value)
    fits = int(re.search(r"use --global_batch_size=(\d+)", str(told.value))[1])
    assert 100 < fits < 10_000 and fits % 2 == 0
    memory_estimate.check_memory(model, state, StepSize(2, 2, fits), available=16 * GIB)


def test_without_a_number_nothing_is_refused():
    size = StepSize(1, 1, 60_000)
    memory_estimate.check_memory(small_network(), (), size, available=None)


def test_memory_of_this_machine_is_found():
    assert 100 << 20 < free_memory.available_bytes() < 100 << 40


def test_what_says_that_memory_ran_out():
    import tensorflow as tf

    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(tf.errors.ResourceExhaustedError(None, None, "OOM"))
    assert is_out_of_memory(RuntimeError("can't start new thread"))
    assert is_out_of_memory(OSError(errno.ENOMEM, "Cannot allocate memory"))
    assert not is_out_of_memory(RuntimeError("OOM"))


@pytest.mark.parametrize("error", [MemoryError("stack"), RuntimeError("can't start new thread")])
def test_an_error_of_memory_while_a_function_is_traced_is_one(error):
    """TensorFlow raises another one in its place: StagingError, or RuntimeError."""
    import tensorflow as tf

    def fail():
        raise error

    with pytest.raises(Exception, match="in user code") as caught:
        tf.function(fail)()
    assert is_out_of_memory(caught.value)
    assert str(out_of_memory(caught.value)).startswith(f"out of memory ({error});")


def test_a_full_disk_is_no_lack_of_memory():
    """TensorFlow has one class for both."""
    import tensorflow as tf

    with pytest.raises(DiskFullError) as caught:
        try:
            raise tf.errors.ResourceExhaustedError(None, None, "f; No space left on device")
        except tf.errors.OpError as error:
            raise DiskFullError("f: No space left on device; make room") from error
    assert not is_out_of_memory(caught.value)


def test_an_error_at_the_limit_of_the_address_space_is_one_of_memory():
    """In a process of its own, whose limit cannot be raised again."""
    script = (
        "import mmap, resource\n"
        "from app.runtime.errors import is_from_lack_of_memory, is_out_of_memory\n"
        "error = ImportError('failed to map segment from shared object')\n"
        "found = [is_from_lack_of_memory(error)]\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "found.append(is_from_lack_of_memory(error))\n"
        "kept = []\n"
        "try:\n"
        "    while True: kept.append(mmap.mmap(-1, 32 << 20))\n"
        "except OSError: pass\n"
        "print(*found, is_from_lack_of_memory(error), is_out_of_memory(error))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False", "True", "False"]


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

    monkeypatch.setattr(free_memory, "_read", read)
    assert free_memory.available_bytes() == 1_500_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert free_memory.available_bytes() == 8000 * 1024
    own, outer = "/sys/fs/cgroup/memory/jobs/7", "/sys/fs/cgroup/memory/jobs"
    files["/proc/self/cgroup"] = "2:memory:/jobs/7\n1:cpu:/other\n0::/\n"
    for group, limit in ((own, 9_000_000), (outer, 7_000_000)):  # The smaller one counts.
        files[f"{group}/memory.limit_in_bytes"] = f"{limit}\n"
        files[f"{group}/memory.usage_in_bytes"] = "5000000\n"
        files[f"{group}/memory.stat"] = (
            "inactive_file 1\ntotal_inactive_file 300000\ntotal_active_file 200000\n"
        )
    assert free_memory.available_bytes() == 2_500_000
    files[f"{outer}/memory.limit_in_bytes"] = "1000000\n"
    assert free_memory.available_bytes() == 0
    files.clear()
    assert free_memory.available_bytes() is None
