"""Compares every N-th step of a training with the same step on one device: `--verify_every`."""

import io

from app import console
from app.errors import ConfigError, MismatchError
from app.training.build import TrainingRun
from app.verification.recorder import Reference, StepRecorder, check_repeatable, single_of
from app.verification.verify import judge, unlike_copies
from lockstep.answer.text import line_of, sentence_of
from lockstep.data import file as trace_file
from lockstep.data.trace import Trace
from lockstep.engine.verdict import FAULT
from strategies.base import BatchIterator, StepTotals


class StepCheck:
    """Records single steps of a training, and compares each with one device.

    With several workers, each records its own replicas. The chief compares the recordings, and
    broadcasts the result.

    Args:
        run: the training.

    Raises:
        ConfigError: the steps cannot be repeated.
    """

    def __init__(self, run: TrainingRun):
        try:
            check_repeatable(run.strategy.model)
        except ConfigError as error:
            every = run.config.verification.verify_every
            raise ConfigError(
                f"--verify_every={every}: {error.problem}; leave the flag out"
            ) from error
        self._strategy, self._workers = run.strategy, run.strategy.workers
        self._recorder = StepRecorder(run.strategy, run.fault)
        self._single = single_of(run) if self._workers.is_chief else None
        self._reference: Reference | None = None  # Traces its step once.
        self._last_right = 0

    def train_step(self, iterator: BatchIterator, step: int) -> tuple[StepTotals, bool]:
        """Runs a step as `strategy.train_steps` does, and compares it with one device.

        Returns its totals, and whether it was verified, which the chief knows.

        Args:
            iterator: the training data.
            step: number of the step, from 1.

        Raises:
            MismatchError: the step is not that of one device.
        """
        recorded = Trace(self._recorder.about([step - 1]))
        totals = self._recorder.record_step(
            recorded,
            0,
            lambda: self._strategy.train_observed_steps(iterator, 1, self._recorder),
        )
        recorded = self._gathered(recorded)
        text, is_verified = self._compare(recorded) if self._workers.is_chief else ("", True)
        if text := self._workers.broadcast(text.encode()).decode():
            if self._last_right:
                text += f"; the last verified step without a mismatch is {self._last_right}"
            raise MismatchError(text)
        self._last_right = step if is_verified else self._last_right
        return totals, is_verified

    def _gathered(self, trace: Trace) -> Trace:
        """Returns the recording of all workers; the other workers get their own back."""
        if self._workers.count == 1:
            return trace
        buffer = io.BytesIO()
        trace_file.save(trace, buffer)
        per_worker = [io.BytesIO(message) for message in self._workers.gather(buffer.getvalue())]
        return trace_file.load(per_worker) if self._workers.is_chief else trace

    def _compare(self, recorded: Trace) -> tuple[str, bool]:
        """Returns the first fault of the recorded step in one line, and whether it was verified."""
        assert self._single is not None
        self._reference = self._reference or Reference(self._single, recorded.about)
        trace = Trace(self._reference.about(recorded.about))
        self._reference.record_step(trace, recorded, 0)
        verdict, _ = judge(trace, recorded, self._strategy.name)
        if verdict.status == FAULT:
            return f"{verdict.training} has a mismatch: {line_of(verdict)}", False
        if unlike := unlike_copies(recorded):
            return f"{verdict.training} has a mismatch: {unlike}", False
        if not verdict.ok:
            console.warn(f"{verdict.name_of(verdict.steps[0])}: {sentence_of(verdict)}")
        return "", verdict.ok
