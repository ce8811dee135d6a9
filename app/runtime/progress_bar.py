"""Shows progress: a live bar on a terminal, lines elsewhere."""

import sys
import time
from typing import TYPE_CHECKING, Any, Protocol, Self

from app.runtime import console
from app.runtime.time_left import TimeLeft, duration_text

if TYPE_CHECKING:  # Both take time that a flag error should not cost.
    from rich import progress

    from strategies.base import StepTotals

_SEC_BETWEEN_LINES = 15
_LONG_SEC = 60  # Of a training whose duration is printed as soon as it is known.


class FinishedEpoch(Protocol):
    """The fields of an epoch's record that its line shows."""

    # fmt: off
    @property
    def epoch(self) -> int: ...  # noqa: D102
    @property
    def train_loss(self) -> float: ...  # noqa: D102
    @property
    def train_accuracy(self) -> float | None: ...  # noqa: D102
    @property
    def test_loss(self) -> float: ...  # noqa: D102
    @property
    def test_accuracy(self) -> float | None: ...  # noqa: D102
    @property
    def test_metrics(self) -> dict[str, float]: ...  # noqa: D102
    @property
    def epoch_sec(self) -> float: ...  # noqa: D102
    @property
    def images_per_sec(self) -> float: ...  # noqa: D102
    # fmt: on


class TrainingProgress:
    """Shows the progress of a training: a live bar on a terminal, occasional lines elsewhere.

    Args:
        epochs: number of epochs of the run.
        steps_per_epoch: steps per epoch.
        first_step: number of steps before this run resumed.
        shown: False to show nothing, because another worker does.
        is_case: whether there are examples instead of images, and no accuracy of steps.
    """

    def __init__(
        self,
        epochs: int,
        steps_per_epoch: int,
        first_step: int = 0,
        *,
        shown: bool = True,
        is_case: bool = False,
    ):
        self._epochs, self._steps_per_epoch, self._shown = epochs, steps_per_epoch, shown
        self._is_case, self._unit = is_case, "examples/s" if is_case else "images/s"
        self._total = epochs * steps_per_epoch
        self._time_left, self._is_estimated = TimeLeft(self._total), False
        has_bar = shown and sys.stdout.isatty()
        self._bar = Bar(self._total) if has_bar else None
        self._completed, self._last_line = first_step, time.monotonic()
        self._update(first_step, "compiling")

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def _update(self, completed: int, status: str) -> None:
        self._completed = completed
        if self._bar:
            self._bar.update(completed=completed, status=status)

    def step(self, step: int, totals: "StepTotals", images_per_sec: float) -> None:
        """Shows a step; `totals` are those of the epoch so far."""
        epoch = min((step - 1) // self._steps_per_epoch + 1, self._epochs)
        accuracy = "" if self._is_case else f"  accuracy {totals.accuracy:.3f}"
        status = (
            f"epoch {epoch}/{self._epochs}  loss {totals.loss:.3f}{accuracy}"
            f"  {images_per_sec:,.0f} {self._unit}"
        )
        self._update(step, status)
        left_sec = self._time_left.after(step)
        is_due = time.monotonic() > self._last_line + _SEC_BETWEEN_LINES
        if left_sec and not self._is_estimated:  # The first estimate of a long training, at once.
            is_due, self._is_estimated = is_due or left_sec > _LONG_SEC, True
        if self._shown and not self._bar and is_due:
            left = f", {duration_text(left_sec)} left" if left_sec else ""
            console.say(f"{status}  step {step}/{self._total}{left}")
            self._last_line = time.monotonic()

    def evaluating(self) -> None:
        """Shows that the test set is being evaluated."""
        self._update(self._completed, "evaluating")

    def epoch(self, record: FinishedEpoch) -> None:
        """Prints the line of a finished epoch, above the bar."""
        line = (
            f"epoch {record.epoch:>{len(str(self._epochs))}}/{self._epochs}"
            f"  loss {record.train_loss:.4f}  {_results(record)}  {record.epoch_sec:.2f} s"
            f"  {record.images_per_sec:,.0f} {self._unit}"
        )
        if self._bar:
            self._bar.say(line)
        elif self._shown:
            console.say(line)
            self._last_line = time.monotonic()


def _results(record: FinishedEpoch) -> str:
    """Returns the accuracies of an epoch; for a case, test loss and metrics."""
    if record.train_accuracy is not None and record.test_accuracy is not None:
        return f"train {record.train_accuracy:.4f}  test {record.test_accuracy:.4f}"
    metrics = [f"{name} {value:.4f}" for name, value in record.test_metrics.items()]
    return "  ".join([f"test loss {record.test_loss:.4f}", *metrics])


class StepProgress:
    """Shows the progress of another process: a live bar on a terminal, a line per task elsewhere.

    Args:
        num_steps: steps per task, if a task does not set its own number.
    """

    def __init__(self, num_steps: int):
        self._num_steps = num_steps
        self._bar = _create_bar() if sys.stdout.isatty() else None
        self._warned: set[str] = set()

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
            self._task = self._bar.add_task("", total=self._num_steps, status="")
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar:
            self._bar.stop()

    def start(self, what: str, num_steps: int | None = None) -> None:
        """Shows a new task."""
        if self._bar:
            self._bar.reset(self._task, total=num_steps or self._num_steps, status=what)
            console.log(what)
        else:
            console.say(what)

    def message(self, message: tuple[str, Any]) -> None:
        """Handles `("step", n)`, or `("warning", text)`, which is shown once."""
        kind, value = message
        if kind == "step" and self._bar:
            self._bar.update(self._task, completed=value)
        elif kind == "warning" and value not in self._warned:
            self._warned.add(value)
            console.warn(value)


class Bar:
    """A live bar on the terminal, below the printed lines.

    Args:
        total: number of steps; None if unknown yet.
    """

    def __init__(self, total: int | None = None):
        self._bar = _create_bar()
        self._task = self._bar.add_task("", total=total, status="")

    def start(self) -> None:
        """Shows the bar."""
        self._bar.start()

    def stop(self) -> None:
        """Removes the bar."""
        self._bar.stop()

    def update(self, *, completed: int, status: str, total: int | None = None) -> None:
        """Shows the number of completed steps and a status."""
        self._bar.update(self._task, completed=completed, status=status, total=total)

    def say(self, line: str) -> None:
        """Prints a line above the bar."""
        console.log(line)
        self._bar.console.print(line, highlight=False, soft_wrap=True, markup=False)


def _create_bar() -> "progress.Progress":
    from rich import progress  # Takes 0.1 s, which a flag error should not cost.

    return progress.Progress(
        progress.TextColumn("{task.fields[status]}"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(compact=True),
        transient=True,
        expand=True,
    )
