"""Verifies steps during a training: chooses the steps, and reports mismatches."""

import json
import math
import pathlib
import time
from typing import Any

from app.options import Config
from app.options.names import VERIFY_EVERY
from app.records.files import discard, write_atomically
from app.records.run_metadata import Progress
from app.runtime import console
from app.runtime.errors import ConfigError, LockstepError
from app.training.training_spec import TrainingSpec
from app.verification.recorder import check_repeatable
from app.verification.step_verifier import StepFinding, StepVerifier
from strategies.base import Strategy
from strategies.step_totals import StepTotals

MISMATCH_DIRECTORY = "mismatch"

# By default, ends of epochs after the first are verified at most once in so many steps: a verified
# step takes as long as two to three others.
_STEPS_PER_END = 200


def create_verified_steps(
    config: Config, spec: TrainingSpec, strategy: Strategy, run_dir: pathlib.Path | None
) -> "VerifiedSteps | None":
    """Creates the verifier of steps; None if no step is to be verified or can be.

    Args:
        config: options of the training.
        spec: specification of the training.
        strategy: a built strategy; its observer may inject a fault.
        run_dir: directory for the trace of a mismatch; None on a worker other than the chief.

    Raises:
        ConfigError: `--verify_every` is set, but the steps cannot be verified.
    """
    if config.verification.verify_every == 0:
        return None
    try:
        check_repeatable(strategy.model)
    except ConfigError as error:
        if config.verification.verify_every:
            raise ConfigError(
                f"--verify_every={config.verification.verify_every}: {error.problem}; leave the"
                " flag out"
            ) from error
        if strategy.workers.is_chief:
            console.say(f"No step is verified: {error.problem}")
        return None
    verifier = StepVerifier(config, spec, strategy)
    return VerifiedSteps(config, strategy, verifier, run_dir, spec.steps_per_epoch)


class VerifiedSteps:
    """Chooses the steps to verify, records and checks them.

    The steps are the first one, the last one of the first epoch and every N-th since the start of
    the run. Without N they are the first one, every 500th of an epoch and the last one of each
    epoch, which short epochs share to limit the cost. They depend only on step numbers: a resumed
    training verifies the same steps.

    Args:
        config: sets the steps.
        strategy: a built strategy.
        verifier: records and checks a step.
        run_dir: directory for the trace of a mismatch; None on a worker other than the chief.
        steps_per_epoch: batches per epoch.
    """

    def __init__(
        self,
        config: Config,
        strategy: Strategy,
        verifier: StepVerifier,
        run_dir: pathlib.Path | None,
        steps_per_epoch: int,
    ) -> None:
        self._strategy, self._verifier, self._run_dir = strategy, verifier, run_dir
        self._steps_per_epoch = steps_per_epoch
        self._every = config.verification.verify_every
        self._last_right, self._has_trace, self._is_slow_reported = 0, False, False
        self._step_sec = math.inf  # Of the last step that was not recorded.

    def compile(self, iterator: Any) -> None:
        """Compiles the function of the recorded step, and the computations on one device."""
        self._verifier.compile(iterator)

    def num_steps_before_next(self, progress: Progress) -> int:
        """Returns how many steps fit into one call; 1 if the next one is verified."""
        if self.is_due(progress):
            return 1
        to_next = self._steps_per_epoch - progress.epoch_step
        if self._every is None:
            to_next = min(to_next, VERIFY_EVERY - progress.epoch_step % VERIFY_EVERY)
        else:
            to_next = min(to_next, self._every - progress.step % self._every)
        # The previous step is a separate call, because the state before it is kept.
        return max(1, to_next - 2)

    def is_due(self, progress: Progress, *, steps_ahead: int = 1) -> bool:
        """Returns whether the next step, or one of the steps after it, is to be verified.

        Args:
            progress: progress before the step.
            steps_ahead: number of steps to consider; 1 for only the next.
        """
        step, epoch_step = progress.step + steps_ahead, progress.epoch_step + steps_ahead
        is_end = epoch_step == self._steps_per_epoch
        if step == 1 or (is_end and progress.epoch == 0):
            return True
        if self._every is not None:
            return step % self._every == 0
        if is_end:
            return step // _STEPS_PER_END > (step - self._steps_per_epoch) // _STEPS_PER_END
        return epoch_step % VERIFY_EVERY == 0

    def train_steps(
        self, iterator: Any, num_steps: int, progress: Progress
    ) -> tuple[StepTotals, float]:
        """Runs steps as `strategy.train_steps` does; records a single step that is due.

        Args:
            iterator: the training data.
            num_steps: number of steps.
            progress: progress before the steps.

        Returns:
            The totals, and the seconds of the compiled call; for a recorded step the seconds of a
            usual step, if known, because the rest belongs to the verification.
        """
        if num_steps == 1 and self.is_due(progress):
            totals, call_sec = self._verifier.train_step(iterator, progress.step + 1)
            return totals, min(call_sec, self._step_sec)
        if num_steps == 1 and self.is_due(progress, steps_ahead=2):
            self._verifier.keep_state(progress.step)
        start = time.monotonic()
        totals = self._strategy.train_steps(iterator, num_steps)
        call_sec = time.monotonic() - start
        self._step_sec = call_sec / num_steps
        return totals, call_sec

    def check(self, before: Progress) -> StepFinding | None:
        """Checks the recorded step; keeps the trace of the first mismatch.

        Args:
            before: progress before the step.
        """
        finding = self._verifier.check(before.epoch * self._steps_per_epoch + before.epoch_step)
        self._report_slow_replica()
        if finding is None:
            self._last_right = before.step + 1
            return None
        text = finding.text
        if self._last_right:
            text += f"; the last verified step without a mismatch is {self._last_right}"
        text += self._keep_trace()
        # The path of the trace is known to the chief alone.
        text = json.loads(self._strategy.workers.broadcast(json.dumps(text).encode()))
        return finding._replace(text=text)

    def _keep_trace(self) -> str:
        """Writes the trace of the first mismatch; returns a text with its path."""
        if self._run_dir is None:
            return ""
        path = self._run_dir / MISMATCH_DIRECTORY
        try:
            if not self._has_trace:
                if path.is_dir():
                    discard([path])
                write_atomically(path, self._verifier.save)
        except LockstepError as error:  # It must not hide the mismatch.
            console.warn(f"the trace of the mismatch is not kept: {error}")
            return ""
        self._has_trace = True
        return f"; trace in {path}"

    def _report_slow_replica(self) -> None:
        """Warns once of a straggler, which does not affect the results."""
        slow = self._verifier.slow_replica()
        if slow and not self._is_slow_reported:
            console.warn(slow)
            self._is_slow_reported = True
