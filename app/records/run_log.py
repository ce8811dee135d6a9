"""`log.jsonl`: what happened in a run, one JSON object a line, for machines to read and to check.

Attempts follow one another: `run_start`, `config`, `data`, `resume` where there was something to go
on with, then `epoch` and `checkpoint` as they come, and one `run_stop`. An attempt that was killed
could not write its own; the next one does it.
"""

import contextlib
import dataclasses
import itertools
import json
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from app.records.files import read_text, write_error
from app.records.run_directory import RUN_LOG_FILE
from app.runtime.errors import (
    INTERRUPTED_EXIT_CODE,
    TERMINATED_EXIT_CODE,
    DeviceError,
    LockstepError,
    Terminated,
    is_out_of_memory,
    reason_of,
)
from app.runtime.fault_points import fault_point

CUT_OFF = "the last line is cut off"
_TRAINING = {"epoch", "checkpoint"}
# Exit code → what `run_stop` calls it; an attempt that left no code was killed.
STATUSES = {
    0: "finished",
    1: "failed",
    2: "refused",
    3: "bad_data",
    4: "bad_checkpoint",
    5: "bad_output",
    6: "bad_devices",
    7: "diverged",
    8: "disk_full",
    130: "interrupted",
    138: "stalled",
    143: "terminated",
    None: "killed",
}


class RunLog:
    """The log of a run, to which events are added.

    Args:
        run_dir: the directory of the run, locked.
    """

    def __init__(self, run_dir: pathlib.Path):
        self._path, self._descriptor = run_dir / RUN_LOG_FILE, -1
        self._start, self._under_way = time.monotonic(), False

    def start(self, **fields: Any) -> None:
        """Begins an attempt; ends the one before it, if a kill cut that off.

        Raises:
            DiskFullError, OutputError: it cannot be written.
        """
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._path, flags, 0o644)
        except OSError as error:
            raise write_error(self._path, error) from error
        attempts = self._earlier_attempts()
        if attempts and attempts[-1].stop is None:
            self._write("run_stop", {"status": STATUSES[None], "exit_code": None})
        self._write(
            "run_start",
            {
                "attempt": len(attempts) + 1,
                "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                "pid": os.getpid(),
                **fields,
            },
        )
        self._under_way = True

    def event(self, name: str, /, **fields: Any) -> None:
        """Adds an event.

        Raises:
            DiskFullError, OutputError: it cannot be written.
        """
        self._write(name, fields)

    def stop(self, exit_code: int, **fields: Any) -> None:
        """Ends the attempt, once, if it has begun.

        A disk that is full is told by what was to be saved on it.
        """
        if not self._under_way:
            return
        self._under_way = False
        status = STATUSES.get(exit_code, STATUSES[1])
        with contextlib.suppress(LockstepError):
            self._write("run_stop", {"status": status, "exit_code": exit_code, **fields})

    def close(self) -> None:
        """Closes the file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def _earlier_attempts(self) -> "list[Attempt]":
        """Reads what is there, and cuts off a line that a kill or a full disk left unfinished."""
        try:
            text = read_text(self._path)
        except (OSError, ValueError):  # Damaged: `check_log` will say so. Nothing depends on it.
            return []
        whole = text[: text.rfind("\n") + 1]
        if whole != text:
            os.ftruncate(self._descriptor, len(whole.encode()))
        return _split_attempts(_parse(whole)[0])

    def _write(self, name: str, fields: dict) -> None:
        elapsed_sec = round(time.monotonic() - self._start, 3)
        line = json.dumps({"event": name, "elapsed_sec": elapsed_sec, **fields}) + "\n"
        size_bytes = os.fstat(self._descriptor).st_size
        try:
            fault_point("log")
            written = os.write(self._descriptor, line.encode())
            if written < len(line.encode()):
                os.write(self._descriptor, line.encode()[written:])  # Raises what was in the way.
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, size_bytes)
            raise write_error(self._path, error, len(line)) from error


@contextlib.contextmanager
def open_run_log(run_dir: pathlib.Path) -> Iterator[RunLog]:
    """Opens the log of a run; however the attempt ends, its `run_stop` is written."""
    log = RunLog(run_dir)
    try:
        yield log
        log.stop(0)
    except LockstepError as error:
        log.stop(error.exit_code, error=str(error))
        raise
    except KeyboardInterrupt:
        log.stop(INTERRUPTED_EXIT_CODE)
        raise
    except Terminated:
        log.stop(TERMINATED_EXIT_CODE)
        raise
    except BaseException as error:
        exit_code = DeviceError.exit_code if is_out_of_memory(error) else 1
        log.stop(exit_code, error=f"{type(error).__name__}: {reason_of(error)}")
        raise
    finally:
        log.close()


@dataclasses.dataclass
class Attempt:
    """The events of one attempt.

    Attributes:
        start: the line of `run_start`.
        events: all between it and the stop.
        stop: the line of `run_stop`, None where there is none.
    """

    start: dict
    events: list[dict] = dataclasses.field(default_factory=list)
    stop: dict | None = None


def load_attempts(run_dir: pathlib.Path) -> list[Attempt]:
    """Reads the attempts of a run; lines that are none are left out, see `check_log`."""
    return _split_attempts(_parse(read_text(run_dir / RUN_LOG_FILE))[0])


def check_log(run_dir: pathlib.Path) -> list[str]:
    """Checks the log of a run: what it must hold, in which order, with steps that only grow.

    Returns:
        What is wrong with it, a line each; nothing where all is well. The last attempt may be
        without a stop: it is under way, or was killed. Then the last line may be `CUT_OFF`, too.
    """
    try:
        text = read_text(run_dir / RUN_LOG_FILE)
    except (OSError, ValueError) as error:
        return [f"it cannot be read: {reason_of(error)}"]
    text, end, rest = text.rpartition("\n")
    events, problems = _parse(text)
    if rest:
        problems.append(CUT_OFF)
    if end and (not events or events[0]["event"] != "run_start"):
        problems.append("it does not begin with run_start")
    attempts = _split_attempts(events)
    saved, told_all = (0, 0), True  # Step and epoch of the last checkpoint that is told of.
    for number, attempt in enumerate(attempts, start=1):
        found, saved = _check_attempt(attempt, number, saved, told_all=told_all)
        if attempt.stop is None and number < len(attempts):
            found.append("has no run_stop")
        problems += [f"attempt {number}: {problem}" for problem in found]
        # After a checkpoint was saved, a kill or a full disk may have kept its line from the log.
        status = attempt.stop and attempt.stop["status"]
        told_all = status in ("finished", "interrupted", "terminated", "diverged")
    return problems


_FIELDS: dict[str, dict[str, type]] = {
    "run_start": {"attempt": int, "time": str, "pid": int, "versions": dict},
    "config": {"config": dict, "num_replicas": int, "devices": list},
    "data": {"name": str, "sha256": str, "num_train_examples": int, "num_test_examples": int},
    "resume": {"step": int, "epoch": int, "damaged": list, "changes": list},
    "epoch": {"epoch": int, "step": int, "train_loss": float, "test_accuracy": float},
    "checkpoint": {"step": int, "epoch": int},
    "run_stop": {"status": str},
}


def _parse(text: str) -> tuple[list[dict], list[str]]:
    """Returns the events, and what is wrong with lines that are none."""
    events, problems = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            event = json.loads(line)
            for name, kind in {"event": str, **_FIELDS[event["event"]]}.items():
                if not isinstance(event[name], kind):
                    raise TypeError(f"{name} is {event[name]!r:.80}")
            events.append(event)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"line {number} is no event ({type(error).__name__}: {error})")
    return events, problems


def _split_attempts(events: list[dict]) -> list[Attempt]:
    attempts: list[Attempt] = []
    for event in events:
        if event["event"] == "run_start" or not attempts:
            attempts.append(Attempt(event))
        elif event["event"] == "run_stop" and attempts[-1].stop is None:
            attempts[-1].stop = event
        else:  # What follows a stop is found by the check of the order.
            attempts[-1].events.append(event)
    return attempts


def _check_attempt(
    attempt: Attempt, number: int, saved: tuple[int, int], *, told_all: bool
) -> tuple[list[str], tuple[int, int]]:
    """Checks one attempt.

    Args:
        attempt: its events.
        number: from 1.
        saved: step and epoch of the last checkpoint before it that is told of.
        told_all: whether no later one can have been saved.

    Returns:
        What is wrong with it, and step and epoch of its last checkpoint.
    """
    problems = []
    if attempt.start.get("attempt") != number:
        problems.append(f"calls itself {attempt.start.get('attempt')}")
    names = [event["event"] for event in attempt.events]
    in_order = ["config", "data", "resume"][: 3 if "resume" in names else 2]
    training = names[len(in_order) :]
    if names[: len(in_order)] != in_order[: len(names)] or not set(training) <= _TRAINING:
        problems.append(f"order of events: {', '.join(names[:4])} …")
    elif training and in_order[-1] != "resume" and saved > (0, 0):
        problems.append(f"began anew, though step {saved[0]} was saved")
    at = 0, 0  # Step and epoch that this attempt is at.
    for event, following in itertools.zip_longest(attempt.events, attempt.events[1:]):
        if event["event"] not in {"resume", *_TRAINING}:
            continue
        before, at = at, (event["step"], event["epoch"])
        if event["event"] == "resume":
            if at < saved and not event["damaged"]:
                problems.append(f"resumed at step {at[0]}, though {saved[0]} was saved")
            if at > saved and told_all:
                problems.append(f"resumed at step {at[0]}, but {saved[0]} was saved last")
            saved = at
        elif event["event"] == "epoch":
            if at[1] != before[1] + 1 or at[0] < before[0]:
                problems.append(f"epoch {at[1]} (step {at[0]}) after {before}")
            if following and (following["event"], following.get("step")) != ("checkpoint", at[0]):
                problems.append(f"epoch {at[1]} without its checkpoint")
        else:
            if at <= saved or at < before:
                problems.append(f"checkpoint of step {at[0]} after one of step {saved[0]}")
            saved = at
    return problems + _check_stop(attempt), saved


def _check_stop(attempt: Attempt) -> list[str]:
    stop = attempt.stop or {"status": STATUSES[None], "exit_code": None}
    if stop["status"] != STATUSES.get(stop.get("exit_code"), STATUSES[1]):
        return [f"status {stop['status']} with exit code {stop.get('exit_code')}"]
    epochs = [event["config"].get("epochs") for event in attempt.events if "config" in event]
    reached = [event["epoch"] for event in attempt.events if "epoch" in event]
    if stop["status"] == "finished" and epochs[:1] != reached[-1:]:
        return [f"finished after epoch {reached[-1:]} of {epochs[:1]}"]
    return []
