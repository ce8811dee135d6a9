"""`log.jsonl`: what is written, repaired, and found by its checker."""

import errno
import json
import os

import pytest

from app.records import run_log as run_logs
from app.records.check_value import without_check
from app.records.run_log import open_run_log
from app.records.run_log_check import CUT_OFF, check_log
from app.records.run_log_reader import last_saved_step, load_attempts
from app.runtime import fault_points
from app.runtime.errors import DiskFullError, DivergedError, OutputError, Terminated
from app.runtime.run_context import RunContext

CONFIG = {"config": {"epochs": 2}, "num_replicas": 2, "devices": ["/device:CPU:0"]}
DATA = {"name": "synthetic", "sha256": "ab", "num_train_examples": 1, "num_test_examples": 1}


def begin(log):
    log.start(versions={})
    log.event("config", **CONFIG)
    log.event("data", **DATA)


def epoch(log, number):
    log.event("epoch", epoch=number, step=10 * number, train_loss=1.0, test_accuracy=0.5)
    log.event("checkpoint", step=10 * number, epoch=number)


def resume(log, step, epoch, damaged=()):
    log.event("resume", step=step, epoch=epoch, damaged=list(damaged), changes=[])


def attempt(run_dir, *calls):
    with open_run_log(run_dir) as log:
        begin(log)
        for call in calls:
            call(log)


def test_two_attempts(tmp_path):
    with pytest.raises(Terminated):
        attempt(tmp_path, lambda log: epoch(log, 1), interrupt)
    attempt(tmp_path, lambda log: resume(log, 10, 1), lambda log: epoch(log, 2))
    assert check_log(tmp_path) == []
    assert [a.stop["status"] for a in load_attempts(tmp_path)] == ["terminated", "finished"]
    assert [a.start["attempt"] for a in load_attempts(tmp_path)] == [1, 2]


def interrupt(log):
    raise Terminated


def test_statuses_follow_the_exit_code(tmp_path):
    for error in (DivergedError("x; y"), KeyboardInterrupt(), ZeroDivisionError()):

        def fail(log, error=error):
            raise error

        with pytest.raises(type(error)):
            attempt(tmp_path, fail)
    stops = [a.stop for a in load_attempts(tmp_path)]
    assert [(stop["status"], stop["exit_code"]) for stop in stops] == [
        ("diverged", 7), ("interrupted", 130), ("failed", 1),
    ]  # fmt: skip
    assert check_log(tmp_path) == []


def test_what_a_kill_left_is_ended_by_the_next_attempt(tmp_path):
    attempt(tmp_path, lambda log: epoch(log, 1), lambda log: epoch(log, 2))
    path = tmp_path / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]) + lines[5][:7])
    assert check_log(tmp_path) == [CUT_OFF]
    attempt(tmp_path, lambda log: resume(log, 10, 1), lambda log: epoch(log, 2))
    assert check_log(tmp_path) == []
    assert [a.stop["status"] for a in load_attempts(tmp_path)] == ["killed", "finished"]


@pytest.mark.parametrize(
    "rest", [b"\0" * 70, b'{"event": "ep' + b"\0" * 9, b"\xff\n\xfe\n{}", b'\0\0\0": 2}\n', b"7\n"]
)
def test_what_a_power_cut_left_of_a_line_is_removed_by_the_next_attempt(tmp_path, rest):
    """Zeros or other bytes, also several lines of them, or the end of the line alone."""
    attempt(tmp_path, lambda log: epoch(log, 1))
    path = tmp_path / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + rest)
    assert check_log(tmp_path) != []
    attempt(tmp_path, lambda log: resume(log, 10, 1), lambda log: epoch(log, 2))
    assert check_log(tmp_path) == []
    assert [a.stop["status"] for a in load_attempts(tmp_path)] == ["killed", "finished"]


def test_damage_within_the_log_is_kept_and_the_attempts_are_counted(tmp_path):
    attempt(tmp_path, lambda log: epoch(log, 1))
    path = tmp_path / "log.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\xff\n" + b"".join(lines[1:]))
    attempt(tmp_path, lambda log: resume(log, 10, 1))
    content = path.read_bytes()
    assert b"\xff\n" in content and b'"attempt": 2' in content
    assert "cannot be read" in check_log(tmp_path)[0]


def test_lines_of_a_killed_attempt_are_synced_before_others_follow(tmp_path, monkeypatch):
    attempt(tmp_path)
    size_bytes, synced, fsync = (tmp_path / "log.jsonl").stat().st_size, [], os.fsync

    def record_size(descriptor):
        synced.append(os.fstat(descriptor).st_size)
        fsync(descriptor)

    monkeypatch.setattr(run_logs.os, "fsync", record_size)
    attempt(tmp_path)
    assert size_bytes in synced and synced[-1] > size_bytes


def test_the_name_of_a_new_log_is_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(run_logs, "fsync", synced.append)
    attempt(tmp_path)
    assert synced == [tmp_path]


def test_the_last_saved_step_is_that_of_the_log(tmp_path):
    assert last_saved_step(tmp_path) == 0
    attempt(tmp_path, lambda log: epoch(log, 1), lambda log: epoch(log, 2))
    assert last_saved_step(tmp_path) == 20


def test_a_refused_start_leaves_no_line(tmp_path):
    with pytest.raises(OutputError), open_run_log(tmp_path):
        raise OutputError("refused for a test")
    assert list(tmp_path.iterdir()) == []


def test_a_line_that_is_written_in_part_is_taken_back(tmp_path, monkeypatch):
    """The disk is full after ten bytes of it; the stop that follows finds room."""
    write, sizes = os.write, iter([10])

    def write_part(descriptor, data):
        if b'"epoch"' not in data:
            return write(descriptor, data)
        if (size := next(sizes, None)) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:size])

    with monkeypatch.context() as patch, pytest.raises(DiskFullError):
        patch.setattr(os, "write", write_part)
        attempt(tmp_path, lambda log: log.event("epoch", epoch=1, step=10))
    assert check_log(tmp_path) == []
    assert load_attempts(tmp_path)[0].stop["status"] == "disk_full"


def test_a_full_disk_leaves_whole_lines(tmp_path):
    with RunContext():
        fault_points.arm({fault_points.VARIABLE: "log:4:enospc"})
        with pytest.raises(DiskFullError, match=r"log\.jsonl"):
            attempt(tmp_path, lambda log: epoch(log, 1))
    assert check_log(tmp_path) == []
    assert load_attempts(tmp_path)[0].stop["status"] == "disk_full"


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "victim").write_text("keep")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "log.jsonl").symlink_to("../victim")
    with pytest.raises(OutputError, match="symbolic link"):
        attempt(tmp_path / "run")
    assert (tmp_path / "victim").read_text() == "keep"


def without(event):
    return lambda lines: [line for line in lines if line["event"] != event]


def swap(first, second):
    def change(lines):
        lines[first], lines[second] = lines[second], lines[first]
        return lines

    return change


def put(position, **changes):
    def change(lines):
        lines[position] |= changes
        return lines

    return change


# Lines: run_start, config, data, epoch, checkpoint, epoch, checkpoint, run_stop, then again with
# resume in the place of the first epoch.
WRONG = {
    "no start": (without("run_start"), "does not begin with run_start"),
    "no stop": (lambda lines: lines[:7] + lines[8:], "attempt 1: has no run_stop"),
    "two stops": (lambda lines: [*lines[:8], *lines[7:]], "order of events"),
    "no data": (without("data"), "order of events"),
    "data first": (swap(1, 2), "order of events"),
    "another attempt": (put(8, attempt=7), "calls itself 7"),
    "an epoch left out": (put(5, epoch=3), "epoch 3 (step 20) after (10, 1)"),
    "a step that shrinks": (put(6, step=9), "checkpoint of step 9 after one of step 10"),
    "work that was lost": (put(11, step=10, epoch=1), "resumed at step 10, though 20 was saved"),
    "another status": (put(7, status="finished", exit_code=7), "finished with exit code 7"),
    "finished too early": (lambda lines: lines[:5] + lines[7:8], "finished after epoch [1] of [2]"),
    "a new start": (
        lambda lines: [*lines[:11], lines[3] | {"step": 30, "epoch": 1}],
        "started from scratch, although step 20 was saved",
    ),
    "work from nowhere": (put(11, step=30), "resumed at step 30, but 20 was saved last"),
    "an epoch that is not saved": (lambda lines: lines[:4] + lines[5:], "without its checkpoint"),
    "a field of another type": (put(4, step="10"), "line 5 is no event"),
    "an unknown event": (put(4, event="party"), "line 5 is no event"),
}


@pytest.mark.parametrize("case", WRONG)
def test_the_checker_finds(tmp_path, case):
    attempt(tmp_path, lambda log: epoch(log, 1), lambda log: epoch(log, 2))
    attempt(tmp_path, lambda log: resume(log, 20, 2))
    path = tmp_path / "log.jsonl"
    assert check_log(tmp_path) == []
    change, told = WRONG[case]
    lines = change([without_check(json.loads(line)) for line in path.read_text().splitlines()])
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert told in "\n".join(check_log(tmp_path))


@pytest.mark.parametrize("content", [b"\xff\xfe\n", b"{}\n", b"[" * 100_000 + b"\n"])
def test_what_is_no_log_is_told(tmp_path, content):
    (tmp_path / "log.jsonl").write_bytes(content)
    assert check_log(tmp_path)


def test_a_checkpoint_that_no_line_tells_of_is_no_fault_after_a_kill(tmp_path):
    attempt(tmp_path, lambda log: epoch(log, 1), lambda log: epoch(log, 2))
    path = tmp_path / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:5]))  # Killed after it had saved step 20.
    attempt(tmp_path, lambda log: resume(log, 20, 2))
    assert check_log(tmp_path) == []


def test_damage_explains_a_step_back(tmp_path):
    attempt(tmp_path, lambda log: epoch(log, 1), lambda log: epoch(log, 2))
    attempt(tmp_path, lambda log: resume(log, 10, 1, ["step-00000020"]), lambda log: epoch(log, 2))
    assert check_log(tmp_path) == []


def test_a_log_that_cannot_be_cut_is_refused(tmp_path, monkeypatch):
    (tmp_path / "log.jsonl").write_text('{"event": "run_st')

    def fail(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "ftruncate", fail)
    with pytest.raises(OutputError, match="Read-only"), open_run_log(tmp_path) as log:
        log.start()
