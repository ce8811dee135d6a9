"""Shows progress with rich: a live bar on a terminal, lines elsewhere."""

import sys
import time
from typing import TYPE_CHECKING, Any, Self

from app.runtime import console

if TYPE_CHECKING:  # Both take time that a flag error should not cost.
    from rich import progress

    from strategies.base import StepTotals

_SEC_BETWEEN_LINES = 15
_LONG_SEC = 60  # Of a training whose duration is printed as soon as it is known.
_MIN_MEASURED_SEC = 5.0  # From which a time left is estimated.


def create_bar(*, shown: bool = True) -> "progress.Progress":
    """Returns a bar with a status, which is shown on a terminal only, below the printed lines."""
    from rich import progress  # Takes 0.1 s, which a flag error should not cost.

    return progress.Progress(
        progress.TextColumn("{task.fields[status]}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("{task.fields[left]}"),
        transient=True,
        expand=True,
        disable=not (shown and sys.stdout.isatty()),
    )


def duration_text(seconds: float) -> str:
    """Returns "45 s", "12 min", "3 h 05 min" or "2 d 4 h"."""
    minutes = round(seconds / 60)
    hours = minutes // 60
    if seconds < 99.5:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if hours < 48:
        return f"{hours} h {minutes % 60:02} min"
    return f"{hours // 24:,} d {hours % 24} h"


class RemainingTime:
    """Estimates the time left from the progress since the end of the warm-up.

    The first two steps of a training are slow: TensorFlow compiles, and runs kernels for the first
    time, of a verified step and of a usual one.

    Args:
        num_warm_up: number of first updates that are not measured.

    Attributes:
        seconds: the time left; None while it is not known.
    """

    def __init__(self, num_warm_up: int = 0):
        self._num_warm_up, self._start = num_warm_up, (0.0, 0)
        self.seconds: float | None = None

    @property
    def is_warming_up(self) -> bool:
        """Whether the next update is not measured."""
        return self._num_warm_up > 0

    @property
    def text(self) -> str:
        """Returns "12 min left", or "" while it is not known."""
        return f"{duration_text(self.seconds)} left" if self.seconds else ""

    def update(self, completed: int, total: int) -> None:
        """Estimates again.

        Args:
            completed: work that is done, of any unit.
            total: all work.
        """
        now = time.monotonic()
        if self._num_warm_up:
            self._num_warm_up -= 1
            self._start = now, completed
            return
        started, completed_before = self._start
        if completed > completed_before and now - started >= _MIN_MEASURED_SEC:
            per_unit = (now - started) / (completed - completed_before)
            self.seconds = per_unit * (total - completed)


class TrainingProgress:
    """Shows the progress of a training.

    Args:
        epochs: number of epochs of the run.
        steps_per_epoch: steps per epoch.
        first_step: number of steps before this run resumed.
        shown: False to show nothing, because another worker does.
    """

    def __init__(
        self,
        epochs: int,
        steps_per_epoch: int,
        first_step: int = 0,
        *,
        shown: bool = True,
    ):
        self._epochs, self._steps_per_epoch, self._shown = epochs, steps_per_epoch, shown
        self._total, self._is_estimated = epochs * steps_per_epoch, False
        self._bar = create_bar(shown=shown)
        self._bar.add_task("", total=self._total, completed=first_step, status="compiling", left="")
        self._task, self._last_line = self._bar.tasks[0], time.monotonic()
        self._remaining = RemainingTime(num_warm_up=2)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def step(self, step: int, totals: "StepTotals", images_per_sec: float) -> None:
        """Shows a step; `totals` are those of the epoch so far."""
        epoch = min((step - 1) // self._steps_per_epoch + 1, self._epochs)
        status = (
            f"epoch {epoch}/{self._epochs}  loss {totals.loss:.3f}  accuracy {totals.accuracy:.3f}"
        )
        if not self._remaining.is_warming_up:
            status += f"  {images_per_sec:,.0f} images/s"
        self._remaining.update(step, self._total)
        left, left_sec = self._remaining.text, self._remaining.seconds
        self._bar.update(self._task.id, completed=step, status=status, left=left)
        is_due = time.monotonic() > self._last_line + _SEC_BETWEEN_LINES
        if left_sec and not self._is_estimated:  # The first estimate of a long training, at once.
            is_due, self._is_estimated = is_due or left_sec > _LONG_SEC, True
        if self._shown and self._bar.disable and is_due:
            left = f", {left}" if left else ""
            console.say(f"{status}  step {step}/{self._total}{left}")
            self._last_line = time.monotonic()

    def evaluating(self) -> None:
        """Shows that the test set is being evaluated."""
        self._bar.update(self._task.id, status="evaluating")

    def epoch(self, record: Any) -> None:
        """Prints the line of a finished epoch (an `EpochRecord`), above the bar."""
        line = (
            f"epoch {record.epoch:>{len(str(self._epochs))}}/{self._epochs}"
            f"  loss {record.train_loss:.4f}  train {record.train_accuracy:.4f}"
            f"  test {record.test_accuracy:.4f}  {record.epoch_sec:.2f} s"
            f"  {record.images_per_sec:,.0f} images/s"
        )
        if not self._bar.disable:
            console.log(line)
            self._bar.console.print(line, highlight=False, soft_wrap=True, markup=False)
        elif self._shown:
            console.say(line)
            self._last_line = time.monotonic()


class StepProgress:
    """Shows the progress of another process: a live bar on a terminal, a line per task elsewhere.

    Args:
        num_steps: steps per task, if a task does not set its own number.
    """

    def __init__(self, num_steps: int):
        self._num_steps, self._bar = num_steps, create_bar()
        self._task = self._bar.add_task("", total=num_steps, status="", left="")
        self._remaining = RemainingTime(num_warm_up=1)
        self._warned: set[str] = set()
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def start(self, what: str, num_steps: int | None = None) -> None:
        """Shows a new task."""
        self._bar.reset(self._task, total=num_steps or self._num_steps, status=what, left="")
        self._remaining = RemainingTime(num_warm_up=1)
        show = console.say if self._bar.disable else console.log
        show(what)

    def message(self, message: tuple[str, Any]) -> None:
        """Handles a message of the process.

        Args:
            message: `("step", n)`; `("phase", (what, done, total))`, where `done` and `total` count
                any unit of work; or `("warning", text)`, which is shown once.
        """
        kind, value = message
        if kind == "step":
            self._remaining.update(value, int(self._bar.tasks[0].total or 0))
            self._bar.update(self._task, completed=value, left=self._remaining.text)
        elif kind == "phase":
            self._show_phase(*value)
        elif kind == "warning" and value not in self._warned:
            self._warned.add(value)
            console.warn(value)

    def _show_phase(self, what: str, done: int, total: int) -> None:
        self._remaining.update(done, total)
        left = self._remaining.text
        self._bar.update(self._task, completed=done, total=total, status=what, left=left)
        if self._bar.disable and time.monotonic() > self._last_line + _SEC_BETWEEN_LINES:
            console.say(f"{what}, {left}" if left else what)
            self._last_line = time.monotonic()
