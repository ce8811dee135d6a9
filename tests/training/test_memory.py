"""Tests what says that memory ran out."""

import errno

import pytest
import tensorflow as tf

from app.runtime.errors import DiskFullError, expected_error, memory_error
from tests.conftest import run_python


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
        assert (memory_error(error) is not None) == expected, error


def test_an_error_of_memory_while_a_function_is_traced_is_one():
    """TensorFlow raises another one in its place."""
    error = RuntimeError("can't start new thread")

    def fail():
        raise error

    with pytest.raises(Exception, match="in user code") as caught:
        tf.function(fail)()
    told = str(expected_error(caught.value))
    assert told.startswith(f"out of memory ({error});")


def test_an_error_at_the_limit_of_the_address_space_is_one_of_memory():
    """In a process of its own, whose limit cannot be raised again."""
    script = (
        "import mmap, resource\n"
        "from app.runtime.errors import expected_error, memory_error\n"
        "error = ImportError('failed to map segment from shared object')\n"
        "found = [expected_error(error) is not None]\n"
        "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
        "found.append(expected_error(error) is not None)\n"
        "kept = []\n"
        "try:\n"
        "    while True: kept.append(mmap.mmap(-1, 32 << 20))\n"
        "except OSError: pass\n"
        "print(*found, expected_error(error) is not None, memory_error(error) is not None)"
    )
    assert run_python("-c", script).stdout.split() == ["False", "False", "True", "False"]
