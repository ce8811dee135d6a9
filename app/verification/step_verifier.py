"""Records and checks single steps of a running training; see `VerifiedSteps`."""

import collections
import dataclasses
import hashlib
import io
import json
import os
import pathlib
import time
from typing import Any, NamedTuple

import numpy as np

from app.options import Config
from app.training.training_spec import TrainingSpec
from app.verification.recorder import SendTime, StepRecorder, find_straggler
from app.verification.strategy_oracle import StrategyOracle
from lockstep import trace_file
from lockstep.arithmetic import bits
from lockstep.engine import Result, check_step, verdict_of
from lockstep.text import line_of
from lockstep.trace import OF_COPIES, Trace
from strategies.base import Strategy
from strategies.copies import State
from strategies.step_totals import StepTotals
from strategies.workers import Workers

TRACE_FILE = "trace.npz"  # Of a step with a mismatch.

_STRAGGLER_STEPS = 8  # Number of last recorded steps in all of which a straggler must be late.


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
    per_shard_statistics: list[list[np.ndarray]]


class StepVerifier:
    """Records steps of a strategy and compares them with one device.

    With several workers, each records its own replicas. The chief gathers and checks all
    recordings, and broadcasts the result.

    Args:
        config: options of the training.
        spec: specification of the training.
        strategy: a built strategy; its observer may inject a fault.
    """

    def __init__(self, config: Config, spec: TrainingSpec, strategy: Strategy):
        self._spec, self._strategy = spec, strategy
        self._verifies_all = config.verification.verify_every == 1
        dtype = config.distribution.communication_dtype
        self._recorder = StepRecorder(strategy, strategy.observer, communication_dtype=dtype)
        self._oracle: StrategyOracle | None = None
        self._previous: Trace | None = None  # The step before the recorded one, or its start.
        self._trace: Trace | None = None  # The recorded step on this worker.
        self._wrong: Trace | None = None  # Of the last step with a mismatch.
        times: Any = collections.deque(maxlen=_STRAGGLER_STEPS)
        self._times: collections.deque[list[SendTime]] = times

    def compile(self, iterator: Any) -> None:
        """Compiles the function of the recorded step, and the computations on one device."""
        self._strategy.train_observed_steps(iterator, 0, self._recorder)
        if self._strategy.workers.is_chief:
            num_threads = min(self._strategy.num_devices, os.cpu_count() or 1)
            about = dataclasses.replace(self._recorder.about(()), replicas=())
            self._oracle = StrategyOracle.of(self._spec, about, num_threads=num_threads)
            self._oracle.compile()

    def keep_state(self, step: int) -> None:
        """Keeps the variables after `step`, the start of the step before the recorded one."""
        self._previous = Trace(self._recorder.about((step,)))
        self._recorder.put_state(self._previous, 0, "before")

    def train_step(self, iterator: Any, step: int) -> tuple[StepTotals, float]:
        """Runs and records a step; returns its totals and the seconds of the call."""
        previous, self._previous = self._previous, None
        has_previous = previous is not None and previous.steps == (step - 2,)
        steps = (step - 2, step - 1) if has_previous else (step - 1,)
        stored = dict(previous.stored()) if has_previous and previous else {}
        self._trace = Trace(self._recorder.about(steps), stored)

        def train() -> tuple[StepTotals, float]:
            start = time.monotonic()
            totals = self._strategy.train_observed_steps(iterator, 1, self._recorder)
            return totals, time.monotonic() - start

        result = self._recorder.record_step(self._trace, len(steps) - 1, train)
        own = np.array(self._recorder.take_times())
        per_worker = self._strategy.workers.gather_arrays([own])
        self._times.append([(float(sec), float(cpu)) for (a,) in per_worker for sec, cpu in a])
        return result

    def check(self, position: int) -> StepFinding | None:
        """Checks the recorded step, whose batch is at `position` in the data, from 0."""
        workers, own = self._strategy.workers, self._trace
        assert own is not None
        trace = gather_trace(own, workers)
        text = self._find(trace, self._oracle, position) if self._oracle else ""
        text = json.loads(workers.broadcast(json.dumps(text).encode()))
        self._trace, self._previous = None, _last_step(own) if self._verifies_all else None
        if not text:
            return None
        self._wrong = trace
        return StepFinding(text, *(self._state_before(trace) if self._oracle else (None, [])))

    def _find(self, trace: Trace, oracle: StrategyOracle, position: int) -> str:
        """Returns what is wrong with the recorded step in one line; "" if nothing is."""
        result, last = Result(), len(trace.steps) - 1
        check_step(trace, last, oracle, list(self._spec.batch(position)), result)
        name, number = self._strategy.name, trace.steps[last]
        verdict = dataclasses.replace(
            verdict_of(trace, result, oracle, name=name, reference="training on one device"),
            steps=(number,),
            step_names={number: f"step {number + 1}"},
        )
        if verdict.ok:
            return ""
        return f"{name} has a mismatch: {line_of(verdict.faults[0], verdict)}"

    def slow_replica(self) -> str:
        """Returns the replica that was slowest in all of the last recorded steps; "" for none."""
        late = find_straggler(list(self._times), self._strategy.replica_weights)
        return f"replica {late.replica_id} is slow: {late.text}" if late else ""

    def save(self, path: pathlib.Path) -> None:
        """Writes the trace of the last step with a mismatch to a directory."""
        assert self._wrong is not None
        path.mkdir()
        trace_file.save(self._wrong, path / TRACE_FILE)

    def _state_before(self, trace: Trace) -> tuple[State | None, list[list[np.ndarray]]]:
        """Returns the state before the step, and the BatchNorm statistics of each shard.

        The state is None if copies of the weights differed: none is known to be the right one.
        """
        last = len(trace.steps) - 1
        copies = [trace.arrays(last, "before", copy) or [] for copy in trace.copies]
        if any([*map(bits, copy)] != [*map(bits, copies[0])] for copy in copies[1:]):
            return None, []
        own = [trace.arrays(last, "own_before", shard) or [] for shard in trace.shards]
        per_shard = [[array for array in each if array is not None] for each in own]
        state = dict(zip(self._strategy.states.variable_names, copies[0], strict=True))
        return state, per_shard if any(per_shard) else []


def _last_step(trace: Trace) -> Trace:
    """Returns the last step of a trace alone."""
    prefix = f"{len(trace.steps)}/"
    found = {name: a for name, a in trace.stored().items() if name.startswith(prefix)}
    about = dataclasses.replace(trace.about, steps=trace.steps[-1:])
    return Trace(about, {f"1/{name.removeprefix(prefix)}": array for name, array in found.items()})


def gather_trace(trace: Trace, workers: Workers) -> Trace:
    """Returns the trace of all replicas; every worker calls it with its own trace.

    Values that all copies of the weights share are sent only if they differ from the chief's.
    """
    if workers.count == 1:
        return trace
    common = {
        name: hashlib.sha256(bits(array)).digest()
        for name, array in trace.stored().items()
        if name.split("/")[1] in OF_COPIES
    }
    chief = workers.broadcast(b"".join(common.values()))
    same = {
        name
        for i, (name, digest) in enumerate(common.items())
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
