"""Shows progress with rich: a live bar on a terminal, lines elsewhere."""

import sys
import time
from typing import TYPE_CHECKING, Any, Self

from rich import progress

from app import console

if TYPE_CHECKING:
    from app.records.history import EpochRecord


class Progress:
    """A progress bar; a context manager. With `shown=False`, another process shows it."""

    def __init__(self, total: int, completed: int = 0, status: str = "", *, shown: bool = True):
        self._shown, self._warned = shown, set[str]()
        self._bar = progress.Progress(
            progress.TextColumn("{task.fields[status]}"),
            progress.BarColumn(bar_width=None),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            transient=True,
            expand=True,
            disable=not (shown and sys.stdout.isatty()),
        )
        self._task = self._bar.add_task("", total=total, completed=completed, status=status)
        self._last_line = time.monotonic()

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def start(self, what: str, total: int | None = None) -> None:
        """Prints and shows a new task, as long as the one before if `total` is None."""
        self._bar.reset(self._task, total=total, status=what)
        (console.say if self._bar.disable else console.log)(what)

    def message(self, message: tuple[str, Any]) -> None:
        """Handles a message of another process: `("step", n)`, or `("warning", text)` once."""
        kind, value = message
        if kind == "step":
            self._bar.update(self._task, completed=value)
        elif kind == "warning" and value not in self._warned:
            self._warned.add(value)
            console.warn(value)

    def print(self, line: str) -> None:
        """Prints a line, above the bar if there is one."""
        if self._shown:
            console.say(line)
            self._last_line = time.monotonic()


class TrainingProgress(Progress):
    """Shows the progress of a training, `first_step` steps of which were trained before."""

    def __init__(self, epochs: int, steps_per_epoch: int, first_step: int, *, shown: bool):
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        super().__init__(epochs * steps_per_epoch, first_step, "building the step", shown=shown)

    def step(self, step: int, loss: float, accuracy: float, images_per_sec: float) -> None:
        """Shows a step, with loss and accuracy of the epoch so far; a verified one has no speed."""
        epoch = (step - 1) // self._steps_per_epoch + 1
        status = f"epoch {epoch}/{self._epochs}  loss {loss:.3f}  accuracy {accuracy:.3f}"
        if images_per_sec:
            status += f"  {images_per_sec:,.0f} images/s"
        self._bar.update(self._task, completed=step, status=status)
        if self._bar.disable and time.monotonic() > self._last_line + 15:
            self.print(f"{status}  step {step}/{self._epochs * self._steps_per_epoch}")

    def building(self) -> None:
        """Says what happens before the first step."""
        if self._bar.disable:
            self.print("building and tracing the step …")

    def evaluating(self, done: int, total: int) -> None:
        """Shows how many examples of the test set have been evaluated."""
        self._bar.update(self._task, status=f"evaluating {done:,}/{total:,}")

    def epoch(self, record: "EpochRecord") -> None:
        """Prints the line of a finished epoch."""
        self.print(
            f"epoch {record.epoch:>{len(str(self._epochs))}}/{self._epochs}"
            f"  loss {record.train_loss:.4f}  train {record.train_accuracy:.4f}"
            f"  test {record.test_accuracy:.4f}  {record.epoch_sec:.2f} s"
            f"  {record.images_per_sec:,.0f} images/s"
        )
