"""Verifies steps during a training: chooses, records and checks them, and reports mismatches."""

import collections
import dataclasses
import hashlib
import io
import json
import math
import os
import pathlib
import time
from typing import Any

import numpy as np

from app.options.names import VERIFY_EVERY
from app.records.files import io_errors_as, remove
from app.records.run_metadata import Progress
from app.runtime import console
from app.runtime.errors import ConfigError, LockstepError
from app.training.step_check import StepFinding
from app.training.training_spec import TrainingSpec
from app.verification.recorder import SendTime, StepRecorder, check_repeatable, find_straggler
from app.verification.strategy_oracle import StrategyOracle
from lockstep.answer.text import line_of
from lockstep.answer.verdict import Finding, Verdict, note_of_repetition
from lockstep.data import file as trace_file
from lockstep.data.trace import OF_COPIES, Trace
from lockstep.numeric.arrays import bits
from lockstep.run import Result, check_step, verdict_of
from strategies.base import Strategy
from strategies.copies import State
from strategies.step_totals import StepTotals
from strategies.workers import Workers

MISMATCH_DIRECTORY, TRACE_FILE = "mismatch", "trace.npz"  # Of a step with a mismatch.

# By default, ends of epochs after the first are verified at most once in so many steps: a verified
# step takes as long as two to three others.
_STEPS_PER_END = 200
_STRAGGLER_STEPS = 8  # Number of last recorded steps in all of which a straggler must be late.


def create_step_verifier(
    run_dir: pathlib.Path | None, spec: TrainingSpec, strategy: Strategy
) -> "StepVerifier | None":
    """Creates the verifier of steps; None if no step is to be verified or can be.

    Args:
        run_dir: directory for the trace of a mismatch; None on a worker other than the chief.
        spec: specification of the training.
        strategy: a built strategy; its observer may inject a fault.

    Raises:
        ConfigError: `--verify_every` is set, but the steps cannot be verified.
    """
    every = spec.config.verification.verify_every
    if every == 0:
        return None
    try:
        check_repeatable(strategy.model)
    except ConfigError as error:
        if every:
            raise ConfigError(
                f"--verify_every={every}: {error.problem}; leave the flag out"
            ) from error
        if strategy.workers.is_chief:
            console.say(f"No step is verified: {error.problem}")
        return None
    return StepVerifier(spec, strategy, run_dir)


class StepVerifier:
    """Chooses the steps to verify, records them, and compares them with one device.

    The steps are the first one, the last one of the first epoch and every N-th since the start of
    the run. Without N they are the first one, every 500th of an epoch and the last one of each
    epoch, which short epochs share to limit the cost. They depend only on step numbers: a resumed
    training verifies the same steps.

    With several workers, each records its own replicas. The chief gathers and checks all
    recordings, and broadcasts the result.

    Args:
        spec: specification of the training.
        strategy: a built strategy; its observer may inject a fault.
        run_dir: directory for the trace of a mismatch; None to keep no trace.
    """

    def __init__(self, spec: TrainingSpec, strategy: Strategy, run_dir: pathlib.Path | None = None):
        self._spec, self._strategy, self._run_dir = spec, strategy, run_dir
        self._every = spec.config.verification.verify_every
        self._last_right, self._has_trace, self._is_slow_reported = 0, False, False
        self._step_sec = math.inf  # Of the last step that was not recorded.
        dtype = spec.config.distribution.communication_dtype
        self._recorder = StepRecorder(strategy, strategy.observer, communication_dtype=dtype)
        self._oracle: StrategyOracle | None = None
        self._iterators: list[Any] = []  # Deleting one of `tf.distribute` can take 30 s.
        self._previous: Trace | None = None  # The step before the recorded one, or its start.
        self._trace: Trace | None = None  # The recorded step on this worker.
        times: Any = collections.deque(maxlen=_STRAGGLER_STEPS)
        self._times: collections.deque[list[SendTime]] = times

    def compile(self, iterator: Any) -> None:
        """Compiles the function of the recorded step, and the computations on one device."""
        self._strategy.train_observed_steps(iterator, 0, self._recorder)
        trace = Trace(dataclasses.replace(self._recorder.about((0,)), replicas=()))
        self._recorder.put_state(trace, 0, "before")  # Called by all workers.
        if self._strategy.workers.is_chief:
            num_threads = min(self._strategy.num_devices, os.cpu_count() or 1)
            trace.put(0, "data", 0, self._spec.batch(0))
            self._oracle = StrategyOracle(self._spec, trace, num_threads=num_threads)
            self._oracle.compile()

    def num_steps_before_next(self, progress: Progress) -> int:
        """Returns how many steps fit into one call; 1 if the next one is verified."""
        to_end = self._spec.steps_per_epoch - progress.epoch_step
        due = (n for n in range(1, to_end + 2) if self.is_due(progress, steps_ahead=n))
        # The previous step is a separate call, because the state before it is kept.
        return max(1, next(due, to_end + 2) - 2)

    def is_due(self, progress: Progress, *, steps_ahead: int = 1) -> bool:
        """Returns whether the next step, or a later one, is to be verified.

        Args:
            progress: progress before the next step.
            steps_ahead: number of the step from here; 1 for the next.
        """
        step, epoch_step = progress.step + steps_ahead, progress.epoch_step + steps_ahead
        is_end = epoch_step == self._spec.steps_per_epoch
        if step == 1 or (is_end and progress.epoch == 0):
            return True
        if self._every is not None:
            return step % self._every == 0
        if is_end:
            return step // _STEPS_PER_END > (step - self._spec.steps_per_epoch) // _STEPS_PER_END
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
            totals, call_sec = self.record_step(iterator, progress.step + 1)
            return totals, min(call_sec, self._step_sec)
        if num_steps == 1 and self.is_due(progress, steps_ahead=2):
            self._previous = Trace(self._recorder.about((progress.step,)))
            self._recorder.put_state(self._previous, 0, "before")
        start = time.monotonic()
        totals = self._strategy.train_steps(iterator, num_steps)
        call_sec = time.monotonic() - start
        self._step_sec = call_sec / num_steps
        return totals, call_sec

    def record_step(self, iterator: Any, step: int) -> tuple[StepTotals, float]:
        """Runs and records a step; returns its totals and the seconds of the call."""
        if self._previous and self._previous.steps != (step - 2,):
            self._previous = None
        self._trace = Trace(self._recorder.about((step - 1,)))

        def train() -> StepTotals:
            return self._strategy.train_observed_steps(iterator, 1, self._recorder)

        result = self._recorder.record_step(self._trace, 0, train)
        own = np.array(self._recorder.take_times())
        per_worker = self._strategy.workers.gather_arrays([own])
        self._times.append([(float(sec), float(cpu)) for (a,) in per_worker for sec, cpu in a])
        return result

    def check(self, before: Progress) -> StepFinding | None:
        """Checks the recorded step; computes a step with a fault a second time.

        Args:
            before: progress before the step.
        """
        workers, own = self._strategy.workers, self._trace
        assert own is not None
        trace = gather_trace(self._with_previous(own), workers)
        verdict = self._verdict(trace, self._oracle, before) if self._oracle else None
        text = self._text(trace, verdict) if verdict and verdict.faults else ""
        can_repeat = verdict is not None and all(map(_is_of_step, verdict.faults))
        message = json.dumps([text, can_repeat]).encode()
        text, can_repeat = json.loads(workers.broadcast(message))
        if text and can_repeat:
            repeated = self._with_previous(self._repeat(own, before))
            second = gather_trace(repeated, workers)
            if verdict and self._oracle:
                again = self._verdict(second, self._oracle, before)
                text += f"; {note_of_repetition(verdict, again)}"
            text = workers.broadcast(text.encode()).decode()
        self._trace, self._previous = None, own if self._every == 1 else None
        late = find_straggler(list(self._times), self._strategy.replica_weights)
        if late and not self._is_slow_reported:  # A straggler does not affect the results.
            console.warn(f"replica {late[0]} is slow: {late[1]}")
            self._is_slow_reported = True
        if not text:
            self._last_right = before.step + 1
            return None
        return StepFinding(text, *(self._state_before(trace) if self._oracle else (None, [])))

    def _with_previous(self, step: Trace) -> Trace:
        """Returns a trace of a step that has the step before, or its start, if that was kept."""
        if self._previous is None:
            return step
        about = dataclasses.replace(step.about, steps=(*self._previous.steps, *step.steps))
        later = {f"2/{name.partition('/')[2]}": array for name, array in step.stored().items()}
        return Trace(about, {**self._previous.stored(), **later})

    def _verdict(self, trace: Trace, oracle: StrategyOracle, before: Progress) -> Verdict:
        """Compares the recorded step with one device."""
        result, last = Result(), len(trace.steps) - 1
        check_step(trace, last, oracle, list(self._spec.batch(self._position(before))), result)
        name, number = self._strategy.name, trace.steps[last]
        return dataclasses.replace(
            verdict_of(trace, result, oracle, name=name, reference="training on one device"),
            steps=(number,),
            step_names={number: f"step {number + 1}"},
        )

    def _position(self, before: Progress) -> int:
        """Returns the number of the next batch in the training data."""
        return before.epoch * self._spec.steps_per_epoch + before.epoch_step

    def _repeat(self, trace: Trace, before: Progress) -> Trace:
        """Runs the recorded step a second time, from the same state; called by all workers.

        Returns:
            The recording of this worker. The training continues from the first run.
        """
        strategy, second = self._strategy, Trace(trace.about)
        batches = self._spec.batches(start_step=self._position(before))
        self._iterators.append(strategy.distribute(batches))

        def train() -> StepTotals:
            return strategy.train_observed_steps(self._iterators[-1], 1, self._recorder)

        self._load(trace, "before")
        self._recorder.record_step(second, 0, train)
        self._recorder.take_times()
        self._load(trace, "after")
        return second

    def _load(self, trace: Trace, when: str) -> None:
        """Loads the state of this worker "before" or "after" the recorded step."""
        strategy = self._strategy
        copies = [trace.arrays(0, when, copy) or [] for copy in strategy.local_copy_ids]
        own = [trace.arrays(0, f"own_{when}", shard) for shard in strategy.local_shard_ids]
        strategy.states.load_each(copies, [arrays for arrays in own if arrays])

    def _text(self, trace: Trace, verdict: Verdict) -> str:
        """Returns the first fault in one line; keeps the trace of the first mismatch."""
        text = f"{verdict.name} has a mismatch: {line_of(verdict.faults[0], verdict)}"
        if self._last_right:
            text += f"; the last verified step without a mismatch is {self._last_right}"
        if self._run_dir is None:
            return text
        path = self._run_dir / MISMATCH_DIRECTORY
        try:
            if not self._has_trace:
                with io_errors_as(path):
                    remove(path)
                    path.mkdir()
                    trace_file.save(trace, path / TRACE_FILE)
        except LockstepError as error:  # It must not hide the mismatch.
            console.warn(f"the trace of the mismatch is not kept: {error}")
            return text
        self._has_trace = True
        return f"{text}; trace in {path}"

    def _state_before(self, trace: Trace) -> tuple[State | None, list[list[np.ndarray]]]:
        """Returns the state before the step, and the BatchNorm statistics of each shard.

        The state is None if copies of the weights differed: none is known to be the right one.
        """
        last = len(trace.steps) - 1
        copies = [trace.arrays(last, "before", copy) or [] for copy in trace.copies]
        if any([*map(bits, copy)] != [*map(bits, copies[0])] for copy in copies[1:]):
            return None, []
        own = [trace.named(last, "own_before", shard) or {} for shard in trace.shards]
        state = dict(zip(self._strategy.states.variable_names, copies[0], strict=True))
        return state, [list(each.values()) for each in own] if any(own) else []


def _is_of_step(fault: Finding) -> bool:
    """Returns whether a fault arises within a step, from its state and its examples alone."""
    is_earlier = fault.stage in ("start", "random numbers", "examples")
    return not is_earlier and not fault.detail.startswith("stale")


def gather_trace(trace: Trace, workers: Workers) -> Trace:
    """Returns the trace of all replicas; every worker calls it with its own trace.

    Values that all copies of the weights share are sent only if they differ from the chief's.
    """
    if workers.count == 1:
        return trace
    shared = [name for name in trace.stored() if name.split("/")[1] in OF_COPIES]
    digests = [hashlib.sha256(bits(trace.stored()[name])).digest() for name in shared]
    chief = workers.broadcast(b"".join(digests))
    same = {
        name
        for i, (name, digest) in enumerate(zip(shared, digests, strict=True))
        if not workers.is_chief and digest == chief[i * 32 : (i + 1) * 32]
    }
    sent = {name: array for name, array in trace.stored().items() if name not in same}
    buffer = io.BytesIO()
    trace_file.save(Trace(trace.about, sent), buffer)
    per_worker = [io.BytesIO(message) for message in workers.gather(buffer.getvalue())]
    if not workers.is_chief:
        return trace
    whole = trace_file.load(per_worker)
    for position in range(len(whole.steps)):
        for kind in OF_COPIES:
            first = whole.arrays(position, kind, 0) or []
            for copy in whole.copies if first else ():
                own = whole.arrays(position, kind, copy) or [None] * len(first)
                filled = [a if b is None else b for a, b in zip(first, own, strict=True)]
                whole.put(position, kind, copy, filled)
    return whole
