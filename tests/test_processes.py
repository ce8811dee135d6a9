"""Functions in processes of their own: results, messages, and every way in which they end."""

import pathlib

import pytest

import process_functions
from app.runtime.errors import DeviceError, DiskFullError
from app.runtime.processes import call_in_child_process


def test_result_and_messages_arrive():
    messages = []
    result = call_in_child_process(process_functions.add, 2, 3, on_message=messages.append)
    assert (result, messages) == (5, [("step", 1), ("step", 2)])


def test_errors_are_those_of_the_function():
    with pytest.raises(DiskFullError, match="make room"):
        call_in_child_process(process_functions.refuse)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: oops"):
        call_in_child_process(process_functions.fail)


def test_a_process_that_was_killed_is_told_apart():
    with pytest.raises(DeviceError, match="exit code 137"):
        call_in_child_process(process_functions.vanish)


def test_a_process_that_hangs_is_given_up():
    messages = []
    with pytest.raises(TimeoutError, match="within 3 s"):
        call_in_child_process(process_functions.hang, on_message=messages.append, timeout_sec=3)
    assert messages == ["started"]


def test_temporary_files_go_with_the_process():
    path = pathlib.Path(call_in_child_process(process_functions.leave_a_file))
    assert path.parent.name.startswith("lockstep-") and not path.parent.exists()
