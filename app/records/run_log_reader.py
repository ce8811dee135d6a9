"""Reads `log.jsonl` as attempts with their events."""

import dataclasses
import json
import pathlib
from typing import Any

from app.records.check_value import without_check
from app.records.files import read_text
from app.records.run_directory import RUN_LOG_FILE

_FIELDS: dict[str, dict[str, Any]] = {
    "run_start": {"attempt": int, "time": str, "pid": int, "versions": dict},
    "config": {"config": dict, "num_replicas": int, "devices": list},
    "data": {"name": str, "sha256": str, "num_train_examples": int, "num_test_examples": int},
    "resume": {"step": int, "epoch": int, "damaged": list, "changes": list},
    "epoch": {"epoch": int, "step": int, "train_loss": float, "test_accuracy": float | None},
    "checkpoint": {"step": int, "epoch": int},
    "run_stop": {"status": str},
}


@dataclasses.dataclass
class Attempt:
    """The events of one attempt.

    Attributes:
        start: the `run_start` event.
        events: the events between start and stop.
        stop: the `run_stop` event; None if there is none.
    """

    start: dict
    events: list[dict] = dataclasses.field(default_factory=list)
    stop: dict | None = None


def load_attempts(run_dir: pathlib.Path) -> list[Attempt]:
    """Reads the attempts of a run; ignores invalid lines, which `check_log` reports."""
    return split_attempts(parse_events(read_text(run_dir / RUN_LOG_FILE))[0])


def last_saved_step(run_dir: pathlib.Path) -> int:
    """Returns the step of the last checkpoint that the log reports as saved; 0 without one."""
    try:
        attempts = load_attempts(run_dir)
    except (OSError, ValueError):
        return 0
    events = [event for attempt in attempts for event in attempt.events]
    steps = [event["step"] for event in events if event["event"] == "checkpoint"]
    return steps[-1] if steps else 0


def parse_events(text: str) -> tuple[list[dict], list[str]]:
    """Returns the events, and the errors of invalid lines."""
    events, problems = [], []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            event = without_check(json.loads(line))
            for name, kind in ({"event": str} | _FIELDS[event["event"]]).items():
                if not isinstance(event[name], kind):
                    raise TypeError(f"{name} is {event[name]!r:.80}")
            events.append(event)
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            problems.append(f"line {number} is no event ({type(error).__name__}: {error})")
    return events, problems


def split_attempts(events: list[dict]) -> list[Attempt]:
    """Splits events into attempts, each from its `run_start` to its `run_stop`."""
    attempts: list[Attempt] = []
    for event in events:
        if event["event"] == "run_start" or not attempts:
            attempts.append(Attempt(event))
        elif event["event"] == "run_stop" and attempts[-1].stop is None:
            attempts[-1].stop = event
        else:  # The check of the order reports events after a stop.
            attempts[-1].events.append(event)
    return attempts
