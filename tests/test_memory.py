"""Tests what is known of memory: what is free, what says that it ran out, what cannot fit."""

import errno

import pytest
import tensorflow as tf

from app.devices import free_memory
from app.devices.device_setup import Devices
from app.options import Config
from app.runtime.errors import DeviceError, DiskFullError, is_out_of_memory, out_of_memory
from app.training.memory_guard import MemoryGuard
from conftest import run_python
from small_models import create


def guard(strategy, monkeypatch, available, **options):
    monkeypatch.setattr("app.training.memory_guard.available_bytes", lambda: available)
    return MemoryGuard(strategy, Config.of(**options), Devices(["/device:CPU:0"], True), 64)


def test_a_batch_beyond_all_memory_is_refused_and_the_line_names_its_shards(monkeypatch):
    """Each image has 3 · 36 outputs of the convolution and 10 of the dense layer, in float32."""
    strategy = create("manual", 2)
    least = 64 * 4 * (3 * 36 + 10)
    guard(strategy, monkeypatch, least).check()
    guard(strategy, monkeypatch, None).check()
    with pytest.raises(DeviceError, match=r"=64, which is 32 images on each of 2 replicas") as told:
        guard(strategy, monkeypatch, least - 1).check()
    assert "0.0 are free; use --global_batch_size=32 or less" in str(told.value)
    with pytest.raises(DeviceError, match="use --global_batch_size=14 or less"):
        guard(strategy, monkeypatch, least // 4 - 1).check()
    accumulating = create("manual", 2, accumulate_steps=4)
    guard(accumulating, monkeypatch, least // 4).check()
    with pytest.raises(DeviceError):
        guard(accumulating, monkeypatch, least // 4 - 1).check()


def test_memory_of_this_machine_is_found():
    assert 100 << 20 < free_memory.available_bytes() < 100 << 40


def test_what_says_that_memory_ran_out_and_what_that_a_disk_is_full():
    """TensorFlow has one class for both."""
    full = DiskFullError("f: No space left on device; make room")
    full.__cause__ = tf.errors.ResourceExhaustedError(None, None, "f; No space left on device")
    for error, expected in [
        (MemoryError(), True),
        (tf.errors.ResourceExhaustedError(None, None, "OOM"), True),
        (RuntimeError("can't start new thread"), True),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), True),
        (RuntimeError("OOM"), False),
        (full, False),
    ]:
        assert is_out_of_memory(error) == expected, error


@pytest.mark.parametrize("error", [MemoryError("stack"), RuntimeError("can't start new thread")])
def test_an_error_of_memory_while_a_function_is_traced_is_one(error):
    """TensorFlow raises another one in its place: StagingError, or RuntimeError."""

    def fail():
        raise error

    with pytest.raises(Exception, match="in user code") as caught:
        tf.function(fail)()
    assert is_out_of_memory(caught.value)
    assert str(out_of_memory(caught.value)).startswith(f"out of memory ({error});")


def test_an_error_at_the_limit_of_the_address_space_is_one_of_memory():
    """In a process of its own, whose limit cannot be raised again."""
    script = (
        "import mmap, resource\n"
        "from app.runtime.errors import expected_error, is_out_of_memory\n"
        "error = ImportError('failed to map segment from shared object')\n"
        "found = [expected_error(error) is not None]\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "found.append(expected_error(error) is not None)\n"
        "kept = []\n"
        "try:\n"
        "    while True: kept.append(mmap.mmap(-1, 32 << 20))\n"
        "except OSError: pass\n"
        "print(*found, expected_error(error) is not None, is_out_of_memory(error))"
    )
    assert run_python("-c", script).stdout.split() == ["False", "False", "True", "False"]


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
