"""Tests what says that memory ran out."""

import errno

import pytest
import tensorflow as tf

from app.errors import DiskFullError, expected_error, memory_error


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
    assert str(expected_error(caught.value)).startswith("out of memory (")
