"""Verifies steps during a training: chooses the steps, and handles mismatches.

`app/verification/step_verifier.py`, in a higher layer, records and checks a step.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from app.options import Config
from app.options.names import VERIFY_EVERY
from app.records.files import discard, write_atomically
from app.records.run_metadata import Progress
from app.runtime import console
from app.runtime.errors import LockstepError, MismatchError
from app.training.training_state import TrainingState
from strategies.base import Strategy
from strategies.copies import State
from strategies.step_totals import StepTotals

MISMATCH_DIRECTORY = "mismatch"

# By default, ends of epochs after the first are verified at most once in so many steps: a verified
# step takes as long as two to three others.
_STEPS_PER_END = 200


class StepFinding(NamedTuple):
    """Describes what is wrong with a step.

    Attributes:
        text: cause, step, kind, tensor, replica and size of the mismatch, in one line.
        before: state before the step, as in a checkpoint; None if copies of the weights differed
            before the step, or on a worker other than the chief.
        per_shard_statistics: BatchNorm statistics before the step.
    """

    text: str
    before: State | None
    per_shard_statistics: list[list[Any]]


class StepVerifier(Protocol):
    """Records and checks single steps; see `app.verification.step_verifier.StepVerifier`."""

    def compile(self, iterator: Any) -> None:
        """Compiles the function of the recorded step without training."""

    def keep_state(self, step: int) -> None:
        """Keeps the weights after `step`, the start of the step before the recorded one."""

    def train_step(self, iterator: Any, step: int) -> tuple[StepTotals, float]:
        """Runs and records a step; returns its totals and the seconds of the call."""

    def check(self, position: int) -> StepFinding | None:
        """Checks the recorded step, whose batch is at `position` in the data, from 0."""

    def slow_replica(self) -> str:
        """Returns the replica that was slowest in all of the last recorded steps; "" for none."""

    def save(self, path: pathlib.Path) -> None:
        """Writes the trace of the recorded step to a directory."""


CreateVerifier = Callable[[Config, Any, Strategy], StepVerifier | None]


class VerifiedSteps:
    """Chooses the steps to verify, and stops the training, or warns, at a mismatch.

    The steps are the first one, the last one of the first epoch and every N-th since the start of
    the run. Without N they are the first one, every 500th of an epoch and the last one of each
    epoch, which short epochs share to limit the cost. They depend only on step numbers: a resumed
    training verifies the same steps.

    Args:
        config: sets the steps and the reaction to a mismatch.
        verifier: the verifier; None to verify no step.
        run_dir: directory for the trace of a mismatch; None on a worker other than the chief.
        steps_per_epoch: batches per epoch.
    """

    def __init__(
        self,
        config: Config,
        verifier: StepVerifier | None,
        run_dir: pathlib.Path | None,
        steps_per_epoch: int,
    ) -> None:
        self._config, self._verifier, self._run_dir = config, verifier, run_dir
        self._steps_per_epoch = steps_per_epoch
        self._every = config.verification.verify_every
        self._last_right, self._keeps_trace, self._is_slow_reported = 0, True, False
        self._step_sec = self._counted_sec = 0.0  # A usual step; the first one, if recorded.

    def compile(self, strategy: Strategy, iterator: Any) -> None:
        """Compiles the step, and the function of the recorded step, if any."""
        strategy.train_steps(iterator, 0)
        if self._verifier:
            self._verifier.compile(iterator)

    def num_steps_before_next(self, progress: Progress) -> int:
        """Returns how many steps fit into one call; 1 if the next one is verified."""
        to_epoch_end = self._steps_per_epoch - progress.epoch_step
        if not self._verifier:
            return to_epoch_end
        if self.is_due(progress):
            return 1
        if self._every is None:
            to_next = min(to_epoch_end, VERIFY_EVERY - progress.epoch_step % VERIFY_EVERY)
        else:
            to_next = min(to_epoch_end, self._every - progress.step % self._every)
        # The previous step is a separate call, because the state before it is kept.
        return max(1, to_next - 2)

    def is_due(self, progress: Progress, *, steps_ahead: int = 1) -> bool:
        """Returns whether the next step, or one of the steps after it, is to be verified.

        Args:
            progress: progress before the step.
            steps_ahead: number of steps to consider; 1 for only the next.
        """
        step, epoch_step = progress.step + steps_ahead, progress.epoch_step + steps_ahead
        if self._verifier is None:
            return False
        is_end = epoch_step == self._steps_per_epoch
        if step == 1 or (is_end and progress.epoch == 0):
            return True
        if self._every is not None:
            return step % self._every == 0
        if is_end:
            return step // _STEPS_PER_END > (step - self._steps_per_epoch) // _STEPS_PER_END
        return epoch_step % VERIFY_EVERY == 0

    def train_step(
        self, strategy: Strategy, iterator: Any, num_steps: int, state: TrainingState
    ) -> tuple[StepTotals, float]:
        """Runs steps as `strategy.train_steps` does; records a single step that is due.

        Returns:
            The totals, and the seconds of the compiled call; for a recorded step the seconds of a
            usual step, if known, because the rest belongs to the verification.
        """
        progress, start = state.progress, time.monotonic()
        if self._verifier and num_steps == 1:
            if self.is_due(progress):
                totals, call_sec = self._verifier.train_step(iterator, progress.step + 1)
                counted = min(call_sec, self._step_sec or call_sec)
                self._counted_sec = 0.0 if self._step_sec else counted
                state.add_verification(time.monotonic() - start - counted)
                return totals, counted
            if self.is_due(progress, steps_ahead=2):
                self._verifier.keep_state(progress.step)
                start = time.monotonic()
        totals = strategy.train_steps(iterator, num_steps)
        call_sec = time.monotonic() - start
        self._step_sec = call_sec / num_steps
        if self._counted_sec > self._step_sec:  # The first recorded step took longer.
            state.move_to_verification(self._counted_sec - self._step_sec)
        self._counted_sec = 0.0
        return totals, call_sec

    def check(self, before: Progress, state: TrainingState, save: Callable[[], None]) -> None:
        """Checks the last step, if it was recorded.

        Args:
            before: progress before the step.
            state: state of the training.
            save: saves a checkpoint.

        Raises:
            MismatchError: the step is wrong, and the training is configured to stop.
        """
        if not self._verifier or state.progress.step != before.step + 1 or not self.is_due(before):
            return
        start = time.monotonic()
        finding = self._verifier.check(before.epoch * self._steps_per_epoch + before.epoch_step)
        self._report_slow_replica()
        state.add_verification(time.monotonic() - start, verified=1, wrong=int(finding is not None))
        if finding is None:
            self._last_right = before.step + 1
            return
        text = finding.text
        if self._last_right:
            text += f"; the last verified step without a mismatch is {self._last_right}"
        trace = self._keep_trace().encode()
        text += state.workers.broadcast(trace).decode()  # The chief stores it.
        if self._config.verification.on_mismatch == "warn":
            console.warn(text)
            return
        counted = state.progress  # Rolling back does not undo the mismatch.
        before = dataclasses.replace(
            before, verified_steps=counted.verified_steps, mismatches=counted.mismatches
        )
        if state.roll_back(before, finding.before, finding.per_shard_statistics):
            save()
        kept = state.checkpoints.saved_step
        what = f"the state after step {kept}" if kept else "no state"
        raise MismatchError(
            f"{text}; {what} is saved; find the cause, or resume with --on_mismatch=warn"
        )

    def _keep_trace(self) -> str:
        """Writes the trace of the first mismatch; returns a text with its path."""
        if self._run_dir is None or self._verifier is None:
            return ""
        path = self._run_dir / MISMATCH_DIRECTORY
        if self._keeps_trace:
            self._keeps_trace = False
            try:
                if path.is_dir():
                    discard([path])
                write_atomically(path, self._verifier.save)
            except LockstepError as error:  # It must not hide the mismatch.
                console.warn(f"the trace of the mismatch is not kept: {error}")
                return ""
            return f"; trace in {path}"
        return ""

    def _report_slow_replica(self) -> None:
        """Warns once of a straggler, which does not affect the results."""
        if self._verifier and (slow := self._verifier.slow_replica()):
            if not self._is_slow_reported:
                console.warn(slow)
            self._is_slow_reported = True
