"""Tests how the launcher finds and reports a failed worker, without processes."""

import types

import pytest

from app.cluster import worker_failure
from app.cluster.worker_process import Failure


class Worker:
    """The attributes of a worker that `find_culprit` uses."""

    def __init__(self, index, exit_code, *, is_stopped=False, killed=False):
        self.index, self.exit_code, self.is_stopped = index, exit_code, is_stopped
        self.process = types.SimpleNamespace(was_killed=killed)

    def join(self):
        """Nothing to wait for."""

    def failure(self, exit_code, what):
        return Failure(self.index, exit_code, what, [])


@pytest.fixture(autouse=True)
def _no_wait(monkeypatch):
    monkeypatch.setattr(worker_failure, "_SETTLE_SEC", 0.0)


@pytest.mark.parametrize(
    ("workers", "index", "exit_code", "what"),
    [
        ([Worker(0, 138), Worker(1, 137, killed=True)], 1, 137, "was ended by SIGKILL"),
        ([Worker(0, 138), Worker(1, None, is_stopped=True)], 1, 138, "was stopped"),
        ([Worker(0, 134, killed=True), Worker(1, 3)], 1, 3, "ended with code 3"),
        ([Worker(0, 137, killed=True), Worker(1, 8)], 1, 8, "ended with code 8"),
        ([Worker(0, 138), Worker(1, None)], 0, 138, "ended with code 138"),
        ([Worker(0, 128 + 40, killed=True), Worker(1, None)], 0, 168, "ended by signal 40"),
    ],
)
def test_who_is_to_blame(workers, index, exit_code, what):
    failure = worker_failure.find_culprit(workers)
    assert (failure.index, failure.exit_code) == (index, exit_code)
    assert what in failure.what


def test_only_a_taken_port_is_tried_again_at_once():
    taken = "error: port 1 of 127.0.0.1:1: Address already in use; stop the process"
    assert worker_failure.is_port_in_use(Failure(0, 2, "", ["hello", taken]))
    assert not worker_failure.is_port_in_use(Failure(0, 2, "", ["error: --seed=-1"]))
    assert not worker_failure.is_port_in_use(Failure(0, 138, "", [taken]))


def test_the_worker_s_own_reason_is_passed_on():
    lines = ["error: one", "error: --out=x is in use", "    more"]
    assert worker_failure.reason_of_worker(Failure(0, 5, "", lines)) == "--out=x is in use"
    assert worker_failure.reason_of_worker(Failure(0, 1, "", ["nothing"])) == ""
