"""Records and checks single steps of a running training; see `VerifiedSteps`."""

import collections
import json
import math
import os
import pathlib
import time
from typing import Any

import numpy as np

from app.options import Config
from app.runtime import console
from app.runtime.errors import ConfigError
from app.training.training_spec import TrainingSpec
from app.training.verified_steps import StepFinding
from app.verification.memory_trace import MemoryTrace
from app.verification.recorder import StepRecorder, check_repeatable
from app.verification.split import Split
from app.verification.step_checker import StepChecker
from app.verification.straggler import SendTime, find_straggler
from app.verification.trace_gather import gather_trace
from strategies.base import Strategy
from strategies.copies import State
from strategies.step_totals import StepTotals

_STRAGGLER_STEPS = 8  # Number of last recorded steps in all of which a straggler must be late.


def create_step_verifier(
    config: Config, spec: TrainingSpec, strategy: Strategy
) -> "StepVerifier | None":
    """Creates the verifier of steps; None if no step is to be verified or can be.

    Args:
        config: options of the training.
        spec: specification of the training.
        strategy: a built strategy; its observer may inject a fault.

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
    return StepVerifier(config, spec, strategy)


class StepVerifier:
    """Records steps of a strategy and compares them with the reference.

    With several workers, each records its own replicas. The chief gathers and checks all
    recordings, and broadcasts the result.

    Args:
        config: options of the training.
        spec: specification of the training.
        strategy: a built strategy; its observer may inject a fault.
    """

    def __init__(self, config: Config, spec: TrainingSpec, strategy: Strategy):
        self._config, self._spec, self._strategy = config, spec, strategy
        self._recorder = StepRecorder(strategy, strategy.observer)
        self._split = Split.of(strategy)  # As configured: a fault may change the actual split.
        self._checker: StepChecker | None = None
        self._older: tuple[int, State] | None = None
        self._trace = MemoryTrace(0, self._local_split())
        times: Any = collections.deque(maxlen=_STRAGGLER_STEPS)
        self._times: collections.deque[list[SendTime]] = times

    def compile(self, iterator: Any) -> None:
        """Compiles the function of the recorded step, and builds the reference."""
        self._strategy.train_observed_steps(iterator, 0, self._recorder)
        if self._strategy.workers.is_chief:
            num_threads = min(self._strategy.num_devices, os.cpu_count() or 1)
            self._checker = StepChecker(self._spec, self._strategy.name, num_threads)

    def keep_state(self, step: int) -> None:
        """Keeps the weights after `step`, the start of the step before the recorded one."""
        names = [variable.path for variable in self._strategy.model.trainable_variables]
        copy = self._strategy.copies()[0]
        self._older = step, {name: copy[f"model/{name}"].numpy() for name in names}

    def train_step(self, iterator: Any, step: int) -> tuple[StepTotals, float]:
        """Runs and records a step; returns its totals and the seconds of the call."""
        self._trace = trace = MemoryTrace(step, self._local_split())
        older, self._older = self._older, None
        if older and older[0] == step - 2:
            trace.write(step - 2, "weights", [older[1]])
        self._recorder.write_states(trace, step - 1, _check_nothing)
        start, busy = time.monotonic(), time.process_time()
        totals = self._strategy.train_observed_steps(iterator, 1, self._recorder)
        call_sec = time.monotonic() - start
        if math.isfinite(totals.loss_sum):  # Otherwise the training ends.
            self._recorder.write_parts(trace, step)
            self._recorder.write_step(trace, step, _check_nothing)
            sent = self._recorder.take_times()
            self._add_times([(sec - start, cpu - busy) for sec, cpu in sent])
        return totals, call_sec

    def check(self, position: int) -> StepFinding | None:
        """Checks the recorded step, whose batch is at `position` in the data, from 0."""
        workers = self._strategy.workers
        trace = gather_trace(self._trace, self._split, workers)
        text, state = "", None
        if self._checker and (finding := self._checker.find(trace, position)):
            step = trace.first_step
            text = f"{self._strategy.name} has a mismatch: {finding}"
            if not any(
                len(trace.replicas(step - 1, kind, tensor)) > 1
                for kind in ("slots", "weights")
                for tensor in trace.tensors(step - 1, kind)
            ):
                state = self._state_before(trace)
        self._trace = trace
        text = json.loads(workers.broadcast(json.dumps(text).encode()))
        if self._config.verification.verify_every == 1:  # Otherwise `keep_state` is called in time.
            before = self._trace.first_step - 1
            names = self._trace.tensors(before, "weights")
            self._older = before, {t: self._trace.read(before, "weights", 0, t) for t in names}
        if not text:
            self._trace = MemoryTrace(0, self._local_split())  # Frees its arrays.
            return None
        return StepFinding(text, state, self._statistics_before(trace) if state else [])

    def slow_replica(self) -> str:
        """Returns the replica that was slowest in all of the last recorded steps; "" for none."""
        late = find_straggler(list(self._times), self._strategy.replica_weights)
        if late is None:
            return ""
        return (
            f"replica {late.replica_id} is slow: it sends its gradients"
            f" {1000 * late.wait_sec:.0f} ms after all others, which took"
            f" {1000 * late.work_sec:.0f} ms, and they wait for it; the numbers are right"
        )

    def save(self, path: pathlib.Path) -> None:
        """Writes the trace of the last step with a mismatch to a directory."""
        self._trace.save(path)

    def _local_split(self) -> Split:
        """The split of this worker's recording."""
        num, split = self._strategy.workers.count, self._split
        return split._replace(
            num_replicas=split.num_replicas // num,
            num_shards=split.num_shards // num,
            num_copies=len(self._strategy.local_copy_ids),
        )

    def _add_times(self, times: list[SendTime]) -> None:
        per_worker = self._strategy.workers.gather_arrays([np.array(times)])
        self._times.append([(float(sec), float(cpu)) for (a,) in per_worker for sec, cpu in a])

    def _state_before(self, trace: MemoryTrace) -> State:
        """Returns the state before the step, as in a checkpoint."""
        step, state = trace.first_step - 1, {}
        for name in self._strategy.variable_names:
            _, _, tensor = name.partition("/")
            kind = next(
                k for k in ("weights", "statistics", "slots") if tensor in trace.tensors(step, k)
            )
            state[name] = trace.read(step, kind, 0, tensor)
        return state

    def _statistics_before(self, trace: MemoryTrace) -> list[list[np.ndarray]]:
        """Returns each shard's BatchNorm statistics before the step; [] without BatchNorm."""
        step, kind = trace.first_step - 1, "own statistics"
        tensors = trace.tensors(step, kind)
        shards = range(trace.num_shards if tensors else 0)
        return [[trace.read(step, kind, shard_id, t) for t in tensors] for shard_id in shards]


def _check_nothing(step: int, kind: str, per_item: list[dict[str, np.ndarray]]) -> None:
    """Does nothing: the training loop handles a loss that is not finite."""
