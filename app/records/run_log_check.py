"""Checks `log.jsonl`: its events, their order, and increasing steps."""

import itertools
import pathlib

from app.records.files import read_text
from app.records.run_directory import RUN_LOG_FILE
from app.records.run_log import STATUSES
from app.records.run_log_reader import Attempt, parse_events, split_attempts
from app.runtime.errors import reason_of

CUT_OFF = "the last line is truncated"
_TRAINING = {"epoch", "checkpoint"}


def check_log(run_dir: pathlib.Path) -> list[str]:
    """Checks the log of a run: its events, their order, and increasing steps.

    Returns:
        The errors, one line each. The last attempt may be without a stop, because it is running or
        was killed; the last line may then be `CUT_OFF`.
    """
    try:
        text = read_text(run_dir / RUN_LOG_FILE)
    except (OSError, ValueError) as error:
        return [f"it cannot be read: {reason_of(error)}"]
    text, end, rest = text.rpartition("\n")
    events, problems = parse_events(text)
    if rest:
        problems.append(CUT_OFF)
    if end and (not events or events[0]["event"] != "run_start"):
        problems.append("it does not begin with run_start")
    attempts = split_attempts(events)
    saved, told_all = (0, 0), True  # Step and epoch of the last logged checkpoint.
    for number, attempt in enumerate(attempts, start=1):
        found, saved = _check_attempt(attempt, number, saved, told_all=told_all)
        if attempt.stop is None and number < len(attempts):
            found.append("has no run_stop")
        problems += [f"attempt {number}: {problem}" for problem in found]
        # A kill or a full disk may have prevented the log line of a saved checkpoint.
        status = attempt.stop and attempt.stop["status"]
        told_all = status in ("finished", "interrupted", "terminated", "diverged")
    return problems


def _check_attempt(
    attempt: Attempt, number: int, saved: tuple[int, int], *, told_all: bool
) -> tuple[list[str], tuple[int, int]]:
    """Checks one attempt.

    Args:
        attempt: events of the attempt.
        number: number of the attempt, from 1.
        saved: step and epoch of the last logged checkpoint before it.
        told_all: whether every checkpoint was logged.

    Returns:
        The errors, and step and epoch of its last checkpoint.
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
        problems.append(f"started from scratch, although step {saved[0]} was saved")
    at = 0, 0  # Current step and epoch of this attempt.
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
