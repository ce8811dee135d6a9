"""Tests the child processes of the program: results, messages, and all ways in which they end."""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
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
    return Subprocess([sys.executable, "-c", script], child_environment(), **options)


def wait_until_gone(pid):
    deadline = time.monotonic() + 20
    while pathlib.Path(f"/proc/{pid}/stat").exists():
        state = pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        if state == "Z":  # Its new parent has not waited for it yet.
            return
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_result_and_messages_arrive():
    messages = []
    result = call_in_child_process(process_functions.add, 2, 3, on_message=messages.append)
    assert (result, messages) == (5, [("step", 1), ("step", 2)])


def test_a_function_can_be_talked_to():
    with ChildProcess(process_functions.echo) as process:
        large = "x" * 1_000_000
        for message in (1, large):
            process.send(message)
            assert process.receive(60) == ("message", message)
        process.send(None)
        assert process.receive(60) == ("result", None)
    with pytest.raises(OSError):
        os.kill(process.pid, 0)


def test_errors_are_those_of_the_function():
    with pytest.raises(DiskFullError, match="make room"):
        call_in_child_process(process_functions.refuse)
    with pytest.raises(RuntimeError, match="ZeroDivisionError: oops") as raised:
        call_in_child_process(process_functions.fail)
    assert 'raise ZeroDivisionError("oops")' in str(raised.value)


def test_a_process_that_was_killed_is_told_apart():
    with pytest.raises(DeviceError, match="exit code 137"):
        call_in_child_process(process_functions.vanish)
    with pytest.raises(DeviceError, match="probably because memory ran out"):
        call_in_child_process(process_functions.kill_itself)


def test_a_process_that_hangs_is_given_up():
    messages = []
    with pytest.raises(TimeoutError, match="within 3 s"):
        call_in_child_process(process_functions.hang, on_message=messages.append, timeout_sec=3)
    assert messages == ["started"]


def test_temporary_files_go_with_the_process():
    path = pathlib.Path(call_in_child_process(process_functions.leave_a_file))
    assert path.parent.name.startswith("lockstep-tmp-") and not path.parent.exists()


def test_a_process_finds_modules_where_we_do_and_our_environment_stays(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path, "", "/nonexistent/of this test"])
    before = dict(os.environ), tempfile.gettempdir(), sys.modules["__main__"]
    with ChildProcess(process_functions.tell_search_path, environment={"GIVEN": "x"}) as process:
        assert (dict(os.environ), tempfile.gettempdir(), sys.modules["__main__"]) == before
        _, (path, folder, given, temporary) = process.receive(60)
    assert path == [name or str(ROOT) for name in sys.path]
    assert (folder, given) == (str(tmp_path), "x")
    assert pathlib.Path(temporary).parent == pathlib.Path(before[1])
    assert not pathlib.Path(temporary).exists()


def test_what_a_function_keeps_does_not_delay_the_end():
    warnings = []
    start = time.monotonic()
    call_in_child_process(process_functions.warn_and_keep, on_message=warnings.append)
    assert warnings == ["a warning"] and time.monotonic() - start < 30


def test_a_process_ends_with_the_one_that_has_started_it(tmp_path):
    """Killed, so that it can end nothing itself."""
    script = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / 'tests')!r}]\n"
        "import process_functions; from app.runtime.processes import ChildProcess\n"
        f"with ChildProcess(process_functions.tell_and_wait, {str(tmp_path / 'pid')!r}) as child:\n"
        "    child.receive()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert parent.poll() is None
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    wait_until_gone(int((tmp_path / "pid").read_text()))


def test_exit_codes_are_those_of_a_shell():
    process = python("raise SystemExit(7)")
    process.wait(60)
    assert process.exit_code == 7
    killed = python("import os, signal; os.kill(os.getpid(), signal.SIGABRT)")
    killed.wait(60)
    assert killed.exit_code == 128 + signal.SIGABRT


def test_the_end_is_asked_for_and_then_enforced():
    ready = "print('ready', flush=True); import time; time.sleep(3600)"
    polite = python(
        "import signal; signal.signal(15, lambda *_: exit(3)); " + ready, stdout=subprocess.PIPE
    )
    stubborn = python(
        "import signal; signal.signal(15, signal.SIG_IGN); " + ready, stdout=subprocess.PIPE
    )
    for process in (polite, stubborn):
        with process.stdout as stdout:
            assert stdout.readline() == b"ready\n"
            process.end(grace_sec=1)
    assert (polite.exit_code, stubborn.exit_code) == (3, 128 + signal.SIGKILL)


def test_a_request_to_stop_reaches_the_process_and_cores_are_limited():
    core = min(os.sched_getaffinity(0))
    script = (
        "import os, signal, sys\n"
        f"signal.signal({int(signals.STOP_REQUEST)}, lambda *_: sys.exit(9))\n"
        "print(sorted(os.sched_getaffinity(0)), flush=True); signal.pause()"
    )
    process = python(script, stdout=subprocess.PIPE, cores=[core])
    with process.stdout as stdout:
        assert stdout.readline().decode() == f"[{core}]\n"
        process.ask_to_stop()
        assert process.wait(60) == 9


def test_a_thread_can_call_a_function_in_a_process():
    """The kernel counts the thread that has started it as its parent."""
    results = []

    def call():
        results.append(call_in_child_process(process_functions.add, 2, 3))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join(60)
    assert results == [5]


@pytest.mark.parametrize("command", [["false"], ["sleep", "60"], ["/nonexistent/program"]])
def test_other_programs_that_fail_are_an_error_of_the_system(command):
    with pytest.raises(OSError):
        output_of(command, timeout_sec=0.2)
    assert output_of(["echo", "there"], timeout_sec=60) == "there\n"
