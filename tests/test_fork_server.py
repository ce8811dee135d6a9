"""Tests the fork server: results, messages, and every way in which a fork ends."""

import os
import pathlib
import signal
import time

import pytest
from test_processes import wait_until_gone

import process_functions
from app.runtime import fork_server
from app.runtime.errors import DeviceError, DiskFullError
from app.runtime.fork_server import ForkServer


@pytest.fixture(params=["linux", "darwin"])
def system(request, monkeypatch):
    """Forks, and new processes where forks are not safe."""
    monkeypatch.setattr(fork_server.sys, "platform", request.param)
    return request.param


def server(prepare=process_functions.prepare_nothing, *arguments, **options):
    defaults = {"max_calls": 4, "max_running": 2, "on_message": lambda message: None}
    return ForkServer(prepare, *arguments, **(defaults | options))


def test_results_and_messages_arrive(system):
    messages = []
    with server() as forks:
        calls = [
            forks.start(process_functions.add, 2, i, on_message=messages.append) for i in range(4)
        ]
        assert [forks.wait(call) for call in reversed(calls)] == [5, 4, 3, 2]
    assert sorted(messages) == [("step", 1)] * 4 + [("step", 2)] * 4


def test_what_is_prepared_reaches_each_call():
    messages = []
    with server(process_functions.prepare, 7, on_message=messages.append) as forks:
        first, second = (forks.start(process_functions.tell_prepared) for _ in range(2))
        (pid, parent, number), (other_pid, other_parent, _) = map(forks.wait, (first, second))
    assert parent == other_parent and pid != other_pid and number == 7
    assert messages == ["preparing"]


def test_errors_are_those_of_the_function(system):
    with server() as forks:
        refused = forks.start(process_functions.refuse)
        failed = forks.start(process_functions.fail)
        with pytest.raises(RuntimeError, match="ZeroDivisionError: oops"):
            forks.wait(failed)
        with pytest.raises(DiskFullError, match="make room"):
            forks.wait(refused)
        assert forks.wait(forks.start(process_functions.add, 2, 3)) == 5


def test_an_error_of_the_preparation_is_raised():
    with server(process_functions.refuse) as forks:
        call = forks.start(process_functions.add, 2, 3)
        with pytest.raises(DiskFullError, match="make room"):
            forks.wait(call)


def test_a_fork_that_ends_is_noticed():
    with server() as forks:
        vanished = forks.start(process_functions.vanish)
        with pytest.raises(DeviceError, match="ended early with exit code 137"):
            forks.wait(vanished)
        killed = forks.start(process_functions.kill_itself)
        with pytest.raises(DeviceError, match="was killed, probably because memory ran out"):
            forks.wait(killed)
        assert forks.wait(forks.start(process_functions.add, 2, 3)) == 5


def test_no_more_run_than_may(system):
    with server(max_running=1) as forks:
        first = forks.start(process_functions.add, 2, 3)
        forks.start(process_functions.add, 2, 4)
        assert first.is_done


def test_leaving_the_context_ends_the_forks(tmp_path, system):
    path = tmp_path / "pid"
    with server() as forks:
        forks.start(process_functions.tell_and_wait, str(path))
        while not path.exists() or not path.read_text():
            time.sleep(0.05)
    wait_until_gone(int(path.read_text()))


def test_forks_end_with_their_server(tmp_path):
    path = tmp_path / "pid"
    with server() as forks:
        call = forks.start(process_functions.tell_and_wait, str(path))
        while not path.exists() or not path.read_text():
            time.sleep(0.05)
        stat = pathlib.Path(f"/proc/{path.read_text()}/stat").read_text().rpartition(")")[2]
        os.kill(int(stat.split()[1]), signal.SIGKILL)
        with pytest.raises(DeviceError, match="was killed"):
            forks.wait(call)
    wait_until_gone(int(path.read_text()))
