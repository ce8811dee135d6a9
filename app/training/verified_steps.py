"""Verification that is on while a training runs: some steps are recorded and checked.

How a step is recorded and checked is defined in `app/verification/step_verifier.py`, above this
layer; here is which steps those are, and what a mismatch does to the training.
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from app.config import TrainConfig
from app.config.names import VERIFY_EVERY
from app.records.run_metadata import Progress
from app.runtime import console
from app.runtime.errors import LockstepError, MismatchError
from app.training.training_state import TrainingState
from strategies.base import Strategy
from strategies.copies import State
from strategies.step_totals import StepTotals

MISMATCH_DIRECTORY = "mismatch"

# By default the ends of epochs after the first are verified at most once in so many steps: a
# verified step takes as long as two to three others.
_STEPS_PER_END = 200


class StepFinding(NamedTuple):
    """What is wrong with a step.

    Attributes:
        text: cause, step, kind, tensor, replica and size of the mismatch, in one line.
        before: the state before the step as a checkpoint has it; None where copies of the weights
            differed before the step, or on a worker that is not the chief.
        per_shard_statistics: of BatchNorm, before the step.
    """

    text: str
    before: State | None
    per_shard_statistics: list[list[Any]]


class StepVerifier(Protocol):
    """Records and checks single steps; see `app.verification.step_verifier.StepVerifier`."""

    def compile(self, iterator: Any) -> None:
        """Compiles the function of the recorded step, and trains nothing."""

    def keep_state(self, step: int) -> None:
        """Keeps the weights after `step`, from which the step before the recorded one starts."""

    def train_step(self, iterator: Any, step: int) -> tuple[StepTotals, float]:
        """Makes a step and records it; returns its totals and how long the call took."""

    def check(self, position: int) -> StepFinding | None:
        """Checks the recorded step, whose batch is that of `position` in the data, from 0."""

    def slow_replica(self) -> str:
        """Returns which replica others wait for in all of the last recorded steps; "" for none."""

    def save(self, path: pathlib.Path) -> None:
        """Writes the trace of the recorded step to a directory."""


CreateVerifier = Callable[[TrainConfig, Any, Strategy], StepVerifier | None]


def create_no_verifier(config: TrainConfig, spec: Any, strategy: Strategy) -> None:
    """Returns None: no step is verified."""


class VerifiedSteps:
    """Chooses the steps that are verified, and stops the training, or warns, at a mismatch.

    The steps are the first one, the last one of the first epoch and every N-th since the start of
    the run. Without an N they are the first one, every 500th of an epoch and the last one of each
    epoch, where short epochs share one, so that the cost stays low. They follow from the numbers
    of the steps alone: a training that is resumed verifies the same ones.

    Args:
        config: says how many, and what a mismatch does.
        verifier: None where no step is verified.
        run_dir: where the trace of a mismatch is kept; None on a worker that is not the chief.
        steps_per_epoch: batches of an epoch.
    """

    def __init__(
        self,
        config: TrainConfig,
        verifier: StepVerifier | None,
        run_dir: pathlib.Path | None,
        steps_per_epoch: int,
    ) -> None:
        self._config, self._verifier, self._run_dir = config, verifier, run_dir
        self._steps_per_epoch = steps_per_epoch
        self._every = config.verify_every
        self._last_right, self._keeps_trace, self._is_slow_reported = 0, True, False
        self._step_sec = self._counted_sec = 0.0  # A usual step; the first one, if recorded.

    def compile(self, strategy: Strategy, iterator: Any) -> None:
        """Compiles the step, and the function of the recorded step where there is one."""
        strategy.train_steps(iterator, 0)
        if self._verifier:
            self._verifier.compile(iterator)

    def num_steps_before_next(self, progress: Progress) -> int:
        """Returns how many steps can be made in one call; 1 where the next one is verified."""
        to_epoch_end = self._steps_per_epoch - progress.epoch_step
        if not self._verifier:
            return to_epoch_end
        if self.is_due(progress):
            return 1
        if self._every is None:
            to_next = min(to_epoch_end, VERIFY_EVERY - progress.epoch_step % VERIFY_EVERY)
        else:
            to_next = min(to_epoch_end, self._every - progress.step % self._every)
        # The step before is a call of its own: the state that it starts from is kept.
        return max(1, to_next - 2)

    def is_due(self, progress: Progress, *, steps_ahead: int = 1) -> bool:
        """Tells whether the next step, or one of those after it, is to be verified.

        Args:
            progress: before the step.
            steps_ahead: 1 for the next one.
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
        """Makes steps as `strategy.train_steps` does; a single one that is due is recorded.

        Returns:
            The totals, and the seconds of the compiled call; of a recorded step those of a usual
            step, where they are known: what recording adds belongs to the verification.
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
        """Checks the step that was just made, if it was recorded.

        Args:
            before: the progress before the step.
            state: of the training.
            save: saves a checkpoint.

        Raises:
            MismatchError: it is wrong, and the training is to stop.
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
        text += state.workers.broadcast(trace).decode()  # The chief keeps it.
        if self._config.on_mismatch == "warn":
            console.warn(text)
            return
        counted = state.progress  # Going back to an earlier state does not undo the mismatch.
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
        """Writes the trace of the first mismatch, and says where it is."""
        if self._run_dir is None or self._verifier is None:
            return ""
        path = self._run_dir / MISMATCH_DIRECTORY
        if self._keeps_trace:
            self._keeps_trace = False
            try:
                self._verifier.save(path)
            except LockstepError as error:  # It must not hide the mismatch.
                console.warn(f"the trace of the mismatch is not kept: {error}")
                return ""
            return f"; trace in {path}"
        return ""

    def _report_slow_replica(self) -> None:
        """Warns once of a replica that all others wait for: the numbers are right."""
        if self._verifier and (slow := self._verifier.slow_replica()):
            if not self._is_slow_reported:
                console.warn(slow)
            self._is_slow_reported = True
