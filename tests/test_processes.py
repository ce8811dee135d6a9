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

import process_functions
from app.runtime import signals
from app.runtime.errors import DeviceError, DiskFullError
from app.runtime.processes import ChildProcess, call_in_child_process
from app.runtime.subprocesses import Subprocess, child_environment, output_of
from conftest import ROOT


def python(script, **options):
    command = [sys.executable, "-c", script]
    return Subprocess(command, child_environment(), stdout=subprocess.PIPE, **options)


def test_result_and_messages_arrive_also_in_a_thread():
    """The kernel counts the thread that has started a process as its parent."""
    messages, results = [], []

    def call():
        add = process_functions.add
        results.append(call_in_child_process(add, 2, 3, on_message=messages.append))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert (results, messages) == ([5], [("step", 1), ("step", 2)])


def test_a_function_can_be_talked_to():
    with ChildProcess(process_functions.echo) as process:
        for message in (1, "x" * 1_000_000):
            process.send(message)
            assert process.receive(60) == ("message", message)
        process.send(None)
        assert process.receive(60) == ("result", None)
    with pytest.raises(OSError):
        os.kill(process.pid, 0)


@pytest.mark.parametrize(
    ("function", "error", "told"),
    [
        (process_functions.refuse, DiskFullError, "make room"),
        (process_functions.fail, RuntimeError, r'(?s)ZeroDivisionError: oops.*raise ZeroDivis'),
        (process_functions.vanish, DeviceError, "exit code 137"),
        (process_functions.kill_itself, DeviceError, "probably because memory ran out"),
        (process_functions.hang, TimeoutError, "within 2 s"),
    ],
)  # fmt: skip
def test_how_it_failed_is_told(function, error, told):
    with pytest.raises(error, match=told):
        call_in_child_process(function, timeout_sec=2 if error is TimeoutError else 60)


def test_a_process_finds_modules_where_we_do_and_our_environment_stays(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "", "/nonexistent/of this test"])
    before = dict(os.environ), sys.modules["__main__"]
    with ChildProcess(process_functions.tell_search_path, environment={"GIVEN": "x"}) as process:
        assert (dict(os.environ), sys.modules["__main__"]) == before
        _, (path, folder, given) = process.receive(60)
    assert path == [name or str(ROOT) for name in sys.path]
    assert (folder, given) == (str(tmp_path), "x")


def test_what_a_function_keeps_does_not_delay_the_end():
    with ChildProcess(process_functions.warn_and_keep) as process:
        assert process.receive(60) == ("message", "a warning")
        assert process.receive(60) == ("result", None)


def test_a_process_ends_with_the_one_that_has_started_it():
    """Killed, so that it can end nothing itself."""
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import process_functions; from app.runtime.processes import ChildProcess, call_function\n"
        "with ChildProcess(call_function, process_functions.hang) as child:\n"
        "    child.receive(); print(child.pid, flush=True); child.receive()\n"
    )
    with python(script) as parent:
        try:
            pid = int(parent.stdout.readline())
        finally:
            parent.kill()
    status, deadline = pathlib.Path(f"/proc/{pid}/stat"), time.monotonic() + 20
    # "Z": its new parent has not waited for it yet.
    try:
        while status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("script", "code"),
    [
        ("raise SystemExit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGABRT)", 128 + signal.SIGABRT),
    ],
)
def test_exit_codes_are_those_of_a_shell(script, code):
    with python(script) as process:
        process.wait(60)
    assert process.exit_code == code


@pytest.mark.parametrize(
    ("handler", "code"), [("lambda *_: exit(3)", 3), ("signal.SIG_IGN", 128 + signal.SIGKILL)]
)
def test_the_end_is_asked_for_and_then_enforced(handler, code):
    script = f"import signal; signal.signal(15, {handler}); print(1, flush=True)"
    with python(f"{script}; import time; time.sleep(3600)") as process:
        try:
            assert process.stdout.readline() == b"1\n"
            process.end(grace_sec=1)
        finally:
            process.kill()
    assert process.exit_code == code


def test_a_request_to_stop_reaches_the_process_and_cores_are_limited():
    core = min(os.sched_getaffinity(0))
    script = (
        "import os, signal, sys\n"
        f"signal.signal({int(signals.STOP_REQUEST)}, lambda *_: sys.exit(9))\n"
        "print(sorted(os.sched_getaffinity(0)), flush=True); signal.pause()"
    )
    with python(script, cores=[core]) as process:
        try:
            assert process.stdout.readline().decode() == f"[{core}]\n"
            process.ask_to_stop()
            assert process.wait(60) == 9
        finally:
            process.kill()


@pytest.mark.parametrize("command", [["false"], ["sleep", "60"], ["/nonexistent/program"]])
def test_other_programs_that_fail_are_an_error_of_the_system(command):
    with pytest.raises(OSError):
        output_of(command, timeout_sec=0.2)
    assert output_of(["echo", "there"], timeout_sec=60) == "there\n"
