"""Reads a training in progress from its run directory.

Reading never fails: a missing or incomplete record counts as not written.
"""

import contextlib
import dataclasses
import datetime
import json
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from app.records.check_value import without_check
from app.records.event_reader import StepScalars
from app.records.files import open_regular, read_text
from app.records.history import HISTORY_FILE, EpochRecord, checked_record
from app.records.run_directory import LOCK_FILE, LOG_FILE, RUN_LOG_FILE, load_run_config
from app.records.run_log_reader import Attempt, load_attempts
from app.runtime.errors import OutputError

_TAIL_BYTES, _TAIL_LINES = 16 << 10, 40
_LOG_LINE = re.compile(r"^\d{4}-\d\d-\d\d (\d\d:\d\d:\d\d),\d{3} (?:INFO )?")


def find_newest_run(directories: Sequence[pathlib.Path]) -> pathlib.Path:
    """Returns the training in some directories that was started last.

    Args:
        directories: directories of trainings or comparisons, or parents of them.

    Returns:
        The directory of the training; the first of `directories` if there is no training yet.
    """
    logs = [
        log
        for directory in directories
        for pattern in ("", "*/", "*/*/")
        for log in directory.glob(pattern + RUN_LOG_FILE)
    ]
    return max((log.parent for log in logs), key=_started, default=directories[0])


def _started(run_dir: pathlib.Path) -> float:
    """Returns the start time of a run's newest attempt, from its lock file."""
    for name in (LOCK_FILE, RUN_LOG_FILE):
        with contextlib.suppress(OSError):
            return (run_dir / name).stat().st_mtime
    return 0.0


@dataclasses.dataclass(frozen=True)
class LiveRun:
    """A training in progress.

    Attributes:
        path: run directory.
        config: contents of `config.json`; empty before it is written.
        attempt: newest attempt in `log.jsonl`; None before the first.
        history: finished epochs.
        points: scalars over the steps.
        latest: scalars of the newest compiled call; None before the first.
        log_lines: last lines of `log.txt`.
        has_lock: whether a command has been started there and created its lock file.
    """

    path: pathlib.Path
    config: dict
    attempt: Attempt | None
    history: Sequence[EpochRecord]
    points: Sequence[StepScalars]
    latest: StepScalars | None
    log_lines: Sequence[str]
    has_lock: bool

    @classmethod
    def load(
        cls, path: pathlib.Path, points: Sequence[StepScalars], latest: StepScalars | None
    ) -> "LiveRun":
        """Reads the records of a run.

        Args:
            path: run directory.
            points: scalars read from its event file.
            latest: newest scalars of its event file.
        """
        config: dict = {}
        with contextlib.suppress(OutputError):
            config = load_run_config(path)
        attempts: list[Attempt] = []
        with contextlib.suppress(OSError, ValueError):
            attempts = load_attempts(path)
        attempt = attempts[-1] if attempts else None
        history, log_lines = _load_history(path), _load_log_lines(path)
        has_lock = (path / LOCK_FILE).exists()
        return cls(path, config, attempt, history, points, latest, log_lines, has_lock)

    @property
    def is_alive(self) -> bool:
        """Whether a process on this machine has the training's process id."""
        pid = self.attempt.start.get("pid") if self.attempt else None
        if not isinstance(pid, int) or pid <= 0:
            return False
        try:
            os.kill(pid, 0)
        except PermissionError:
            return True
        except (OSError, OverflowError):
            return False
        return True

    @property
    def started(self) -> float | None:
        """Start time of the newest attempt, in seconds since 1970."""
        try:
            time = self.attempt.start["time"] if self.attempt else ""
            return datetime.datetime.fromisoformat(time).timestamp()
        except (KeyError, TypeError, ValueError, OverflowError):
            return None

    @property
    def step(self) -> int:
        """The last optimizer step in the records."""
        events = self.attempt.events if self.attempt else []
        known = [event["step"] for event in events if "step" in event]
        known += [record.step for record in self.history[-1:]]
        known += [self.latest.step] if self.latest else []
        return max(known, default=0)

    @property
    def epochs(self) -> int | None:
        """The number of epochs of the training."""
        recorded = self.recorded("config").get("config", {}).get("epochs")
        return _count(recorded) or _count(self.config.get("epochs"))

    @property
    def steps_per_epoch(self) -> int | None:
        """The number of steps per epoch; None if unknown yet."""
        recorded = _count(self.recorded("config").get("steps_per_epoch"))
        if recorded is None and self.history:  # The log of an older version.
            recorded = _count(self.history[0].step)
        return recorded

    @property
    def num_steps(self) -> int | None:
        """The number of steps of the whole training; None if unknown yet."""
        epochs, steps_per_epoch = self.epochs, self.steps_per_epoch
        return epochs * steps_per_epoch if epochs and steps_per_epoch else None

    @property
    def verified_steps(self) -> tuple[int, int]:
        """The number of verified steps, and the number of mismatches."""
        values = self.latest.values if self.latest else {}
        # The scalars do not include a step that is verified after they were written.
        verified, wrong = (
            max(sum(getattr(r, name) for r in self.history), _whole(values.get(f"steps/{name}")))
            for name in ("verified_steps", "mismatches")
        )
        return verified, wrong

    @property
    def remaining_sec(self) -> float | None:
        """Remaining seconds at the pace of this attempt; None at first."""
        num_steps, started = self.num_steps, self.started
        points = [point for point in self.points if started is None or point.time >= started]
        if not num_steps or len(points) < 2 or points[-1].step <= points[0].step:
            return None
        first, last = points[0], points[-1]
        pace_sec = (last.time - first.time) / (last.step - first.step)
        return max(0.0, pace_sec * (num_steps - self.step))

    def recorded(self, name: str) -> dict[str, Any]:
        """Returns the first event of a type in the newest attempt; empty without one."""
        events = self.attempt.events if self.attempt else []
        return next((event for event in events if event["event"] == name), {})


def _load_history(run_dir: pathlib.Path) -> list[EpochRecord]:
    """Reads the epochs up to the first damaged or incomplete line."""
    records: list[EpochRecord] = []
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):
        for line in read_text(run_dir / HISTORY_FILE).splitlines():
            records.append(checked_record(EpochRecord, without_check(json.loads(line))))
    return records


def _load_log_lines(run_dir: pathlib.Path) -> list[str]:
    """Reads the last lines of the log, each with its time of day."""
    try:
        with open_regular(run_dir / LOG_FILE) as file:
            size_bytes = os.fstat(file.fileno()).st_size
            file.seek(max(0, size_bytes - _TAIL_BYTES))
            lines = file.read(_TAIL_BYTES).decode("utf-8", "replace").split("\n")
    except (OSError, ValueError):
        return []
    if size_bytes > _TAIL_BYTES:
        del lines[0]  # Its start is missing.
    shown = [_LOG_LINE.sub(r"\1 ", line) for line in lines if line.strip()]
    return ["".join(c if c.isprintable() else " " for c in line) for line in shown[-_TAIL_LINES:]]


def _count(value: Any) -> int | None:
    """Returns a positive integer; None for any other value."""
    return value if isinstance(value, int) and 0 < value < 1 << 53 else None


def _whole(value: float | None) -> int:
    """Returns a scalar count as an integer."""
    return round(value) if value is not None and 0 <= value < 1 << 53 else 0
