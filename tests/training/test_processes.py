"""The child processes of the program: results, messages, and all ways in which they end."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from app.runtime import signals
from app.runtime.errors import DeviceError, DiskFullError
from app.runtime.processes import (
    ChildProcess,
    Process,
    call_function,
    call_in_child_process,
    output_of,
    prepared_calls,
)
from tests.conftest import ROOT
from tests.training import process_functions


def python(script, **options):
    command = [sys.executable, "-c", script]
    return Process(command, stdout=subprocess.PIPE, **options)


def test_a_function_can_be_talked_to_and_what_it_keeps_does_not_delay_the_end():
    with ChildProcess(process_functions.warn_and_echo) as process:
        assert process.receive(60) == ("message", "a warning")
        for message in (1, "x" * 1_000_000):
            process.send(message)
            assert process.receive(60) == ("message", message)
        process.send(None)
        assert process.receive(60) == ("result", None)
    with pytest.raises(OSError):
        os.kill(process.pid, 0)


def test_a_function_that_hangs_is_ended():
    with pytest.raises(TimeoutError, match="within 2 s"):
        call_in_child_process(process_functions.hang, timeout_sec=2)


def test_a_process_finds_modules_where_we_do_also_from_a_thread(monkeypatch, tmp_path):
    """The kernel counts the thread that has started a process as its parent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "", "/nonexistent/of this test"])
    environment, found = dict(os.environ), []

    def call():
        place = process_functions.tell_search_path
        found.append(call_in_child_process(place, environment={"GIVEN": "x"}))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert found == [([*sys.path, str(ROOT)], str(tmp_path), "x")]
    assert dict(os.environ) == environment


CALL = "processes.call_function, process_functions.hang"
STOP = "result(lambda pid: (os.kill(pid, 19), print(pid, flush=True)))"


@pytest.mark.parametrize(
    "start",
    [
        f"with processes.ChildProcess({CALL}) as call: call.{STOP}",
        f"with processes.prepared_calls(dict) as start: start({CALL}).{STOP}",
    ],
)
def test_a_process_ends_with_the_one_that_has_started_it(start):
    """Killed, so that it can end nothing itself; a stopped process ends only by SIGKILL."""
    script = (
        f"import os, sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.training import process_functions; from app.runtime import processes\n"
        f"{start}\n"
    )
    with python(script) as parent:
        pid = int(parent.stdout.readline())
    wait_for_the_end(pid)


def wait_for_the_end(pid):
    status, deadline = pathlib.Path(f"/proc/{pid}/stat"), time.monotonic() + 20
    # "Z": its new parent has not waited for it yet.
    try:
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_prepared_calls_share_a_process_and_how_one_failed_is_told():
    messages = []
    with prepared_calls(process_functions.prepare) as start:

        def call(function):
            return start(call_function, function).result(messages.append)

        assert call(process_functions.is_prepared) == "given"
        with pytest.raises(RuntimeError, match=r"(?s)ZeroDivisionError: oops.*raise ZeroDivis"):
            call(process_functions.fail)
        assert call(process_functions.is_prepared) == "given"
        with pytest.raises(DeviceError, match="probably because memory ran out"):
            call(process_functions.kill_itself)
    assert messages == [1, 1]  # The second is a fork of its own.
    for function, code in ((process_functions.vanish, 137), (process_functions.leave, 1)):
        with pytest.raises(DeviceError, match=f"exit code {code}"), prepared_calls(dict) as start:
            start(call_function, function).receive(60)
    with pytest.raises(DiskFullError), prepared_calls(process_functions.refuse_to_prepare) as start:
        start(call_function, process_functions.is_prepared).receive(60)


def test_prepared_calls_run_at_once_and_end_with_the_block():
    with prepared_calls(dict) as start:
        first, second = (start(process_functions.warn_and_echo) for _ in range(2))
        for call, text in ((second, "b"), (first, "a")):
            assert call.receive(60) == ("message", "a warning")
            call.send(text)
            assert call.receive(60) == ("message", text)
        first.send(None)
        assert first.receive(60) == ("result", None)
        second.send("c")
        assert second.receive(60) == ("message", "c")
        _, pid = start(call_function, process_functions.hang).receive(60)
        with pytest.raises(TimeoutError, match="no result within"):
            second.receive(0.1)
    wait_for_the_end(pid)


def test_leaving_the_block_kills_a_process_and_its_children():
    script = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); pid = os.fork()\n"
        "if pid: print(pid, flush=True)\ntime.sleep(3600)"
    )
    with python(script, start_new_session=True) as process:
        child = int(process.stdout.readline())
    assert process.exit_code == 128 + signal.SIGKILL
    wait_for_the_end(child)


def test_a_request_to_stop_reaches_the_process_and_cores_are_limited():
    core = min(os.sched_getaffinity(0))
    script = (
        "import os, signal, sys\n"
        f"signal.signal({int(signals.STOP_REQUEST)}, lambda *_: sys.exit(9))\n"
        "print(sorted(os.sched_getaffinity(0)), flush=True); signal.pause()"
    )
    with python(script, cores=[core]) as process:
        assert process.stdout.readline().decode() == f"[{core}]\n"
        process.send_signal(signals.STOP_REQUEST)
        assert process.wait(60) == 9


@pytest.mark.parametrize("command", [["sleep", "60"], ["/nonexistent/program"]])
def test_other_programs_that_do_not_end_are_an_error_of_the_system(command):
    with pytest.raises(OSError):
        output_of(command, timeout_sec=0.2)
    script = "import sys; print(1, flush=True); sys.exit('no')"
    assert output_of([sys.executable, "-c", script], timeout_sec=60) == (1, "1\nno\n")
