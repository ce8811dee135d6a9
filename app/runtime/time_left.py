"""Formats durations, and estimates the remaining time of a training."""

import time

_LEAST_SEC = 3.0  # Of the pace from which the rest is estimated: single steps vary.


def duration_text(seconds: float) -> str:
    """Returns "45 s", "12 min", "3 h 05 min" or "2 d 4 h"."""
    whole_sec = max(0, round(min(seconds, 1e12))) if seconds == seconds else 0
    minutes = round(whole_sec / 60)
    hours = minutes // 60
    if whole_sec < 100:
        return f"{whole_sec} s"
    if minutes < 100:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60:02} min"
    return f"{hours // 24:,} d {hours % 24} h"


class TimeLeft:
    """Estimates the remaining time from the pace since the first call, which compiles.

    Args:
        total: number of steps of the training.
    """

    def __init__(self, total: int) -> None:
        self._total = total
        self._first: tuple[int, float] | None = None

    def after(self, step: int) -> float | None:
        """Returns the seconds that are left after a step; None while the pace is unknown."""
        now = time.monotonic()
        if self._first is None:
            self._first = step, now
        first_step, first_time = self._first
        if now - first_time < _LEAST_SEC or not first_step < step < self._total:
            return None
        return (now - first_time) / (step - first_step) * (self._total - step)
