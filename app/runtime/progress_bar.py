"""Shows progress with rich: a live bar on a terminal, lines elsewhere."""

import sys
import time
from typing import TYPE_CHECKING, Any, Self

from app.runtime import console

if TYPE_CHECKING:
    from strategies.base import StepTotals

_SEC_BETWEEN_LINES = 15
_LONG_SEC = 60  # Of work whose duration is printed as soon as it is known.
_MIN_MEASURED_SEC = 5.0  # From which a time left is estimated.


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


class Progress:
    """Shows how much work is done: a live bar on a terminal, some lines elsewhere.

    The time left is that of the progress since the end of the warm-up, in which TensorFlow compiles
    and runs kernels for the first time.

    Args:
        total: all work, in any unit.
        completed: work that was done before.
        status: what is shown before the first update.
        num_warm_up: number of first updates that are not measured.
        shown: False to show nothing, because another process does.
    """

    def __init__(
        self,
        total: int,
        *,
        completed: int = 0,
        status: str = "",
        num_warm_up: int = 1,
        shown: bool = True,
    ):
        from rich import progress  # Takes 0.1 s, which a flag error should not cost.

        self._total, self._shown, self._warned = total, shown, set[str]()
        self._bar = progress.Progress(
            progress.TextColumn("{task.fields[status]}"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TextColumn("{task.fields[left]}"),
            transient=True,
            expand=True,
            disable=not (shown and sys.stdout.isatty()),
        )
        self._task = self._bar.add_task(
            "", total=total, completed=completed, status=status, left=""
        )
        self._last_line, self._num_warm_up = time.monotonic(), num_warm_up
        self._measured_from, self._left_sec = (0.0, 0), 0.0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def start(self, what: str, total: int | None = None) -> None:
        """Prints and shows a new task, as long as the first if `total` is None."""
        self._bar.reset(self._task, total=total or self._total, status=what, left="")
        self._num_warm_up, self._left_sec = 1, 0.0
        (console.say if self._bar.disable else console.log)(what)

    def update(
        self, completed: int, *, total: int | None = None, status: str = "", line: str = ""
    ) -> None:
        """Shows that more work is done.

        Args:
            completed: work that is done.
            total: all work; None for that of the task.
            status: what is being done; "" for no change.
            line: printed now and then where there is no bar; "" for no line.
        """
        total = total or int(self._bar.tasks[0].total or 0)
        is_first = self._measure(completed, total)
        left = f"{duration_text(self._left_sec)} left" if self._left_sec else ""
        fields: dict[str, Any] = {"status": status} if status else {}
        self._bar.update(self._task, completed=completed, total=total, left=left, **fields)
        is_due = time.monotonic() > self._last_line + _SEC_BETWEEN_LINES
        if line and self._bar.disable and (is_due or (is_first and self._left_sec > _LONG_SEC)):
            self._print(f"{line}, {left}" if left else line)

    def message(self, message: tuple[str, Any]) -> None:
        """Handles a message of another process.

        Args:
            message: `("step", n)`; `("phase", (what, done, total))`, where `done` and `total` count
                any unit of work; or `("warning", text)`, which is shown once.
        """
        kind, value = message
        if kind == "step":
            self.update(value)
        elif kind == "phase":
            what, done, total = value
            self.update(done, total=total, status=what, line=what)
        elif kind == "warning" and value not in self._warned:
            self._warned.add(value)
            console.warn(value)

    def _measure(self, completed: int, total: int) -> bool:
        """Estimates the time left; returns whether this is the first estimate."""
        now, had_none = time.monotonic(), not self._left_sec
        started, before = self._measured_from
        if self._num_warm_up:
            self._num_warm_up -= 1
            self._measured_from = now, completed
        elif completed > before and now - started >= _MIN_MEASURED_SEC:
            self._left_sec = (now - started) / (completed - before) * (total - completed)
        return had_none and self._left_sec > 0

    def _print(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._shown:
            console.say(line)
            self._last_line = time.monotonic()


class TrainingProgress(Progress):
    """Shows the progress of a training.

    Args:
        epochs: number of epochs of the run.
        steps_per_epoch: steps per epoch.
        first_step: number of steps before this run resumed.
        shown: False to show nothing, because another worker does.
    """

    def __init__(
        self, epochs: int, steps_per_epoch: int, first_step: int = 0, *, shown: bool = True
    ):
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        total = epochs * steps_per_epoch
        super().__init__(
            total, completed=first_step, status="compiling", num_warm_up=2, shown=shown
        )

    def step(self, step: int, totals: "StepTotals", images_per_sec: float) -> None:
        """Shows a step; `totals` are those of the epoch so far."""
        epoch = min((step - 1) // self._steps_per_epoch + 1, self._epochs)
        status = (
            f"epoch {epoch}/{self._epochs}  loss {totals.loss:.3f}  accuracy {totals.accuracy:.3f}"
        )
        if not self._num_warm_up:
            status += f"  {images_per_sec:,.0f} images/s"
        self.update(step, status=status, line=f"{status}  step {step}/{self._total}")

    def evaluating(self) -> None:
        """Shows that the test set is being evaluated."""
        self._bar.update(self._task, status="evaluating")

    def epoch(self, record: Any) -> None:
        """Prints the line of a finished epoch (an `EpochRecord`)."""
        self._print(
            f"epoch {record.epoch:>{len(str(self._epochs))}}/{self._epochs}"
            f"  loss {record.train_loss:.4f}  train {record.train_accuracy:.4f}"
            f"  test {record.test_accuracy:.4f}  {record.epoch_sec:.2f} s"
            f"  {record.images_per_sec:,.0f} images/s"
        )
