"""Checks single recorded steps of a running training.

Each step is first compared bitwise with a float32 computation on one device. Only differing arrays
are examined further: by computed bounds where they exist, else by the limits of earlier steps. If
these are exceeded or do not exist yet, the step is measured like a step of `verify`: against
float64, with limits from other orders of summation. The limits depend only on the reference, so
that a wrong step cannot widen them.
"""

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from app.training.training_spec import TrainingSpec
from app.verification.diagnosis import explain
from app.verification.measurement import Measurement, Where, first_mismatch, relative_error
from app.verification.memory_trace import MemoryTrace, same_bits
from app.verification.parallel_reference import ParallelReference
from app.verification.reference import Arrays, ShardResult
from app.verification.step_context import StepContext
from app.verification.step_start import (
    find_shards,
    hash_training_examples,
    rows_of_units,
    state_before,
    statistics_before,
)
from app.verification.tolerance import LARGEST_LIMIT, SummationSample, with_limits
from app.verification.trace_checker import (
    TraceChecker,
    averaged,
    pick,
    read_of_unit,
    replica_agreement,
    unit_arrays,
)
from app.verification.verdict import Finding, StrategyVerdict

Batch = tuple[np.ndarray, np.ndarray]

_KEPT_STEPS = 8  # Number of steps whose spreads determine the limits.


class StepChecker:
    """Compares recorded steps with the reference.

    Args:
        spec: specification of the training.
        strategy: name of the strategy.
        num_threads: number of shards that the float32 reference computes in parallel.
    """

    def __init__(self, spec: TrainingSpec, strategy: str, num_threads: int):
        self._spec, self._strategy = spec, strategy
        self._reference32 = ParallelReference.of(spec, "float32", num_threads=num_threads)
        self._measuring: TraceChecker | None = None
        self._samples: list[list[SummationSample]] = []
        self._limits: dict[tuple[str, str], float] = {}  # Kind and tensor → relative error.

    def find(self, trace: MemoryTrace, position: int) -> Finding | None:
        """Returns what is wrong with a step; None if it is correct.

        A step with results that are not finite is not checked, unless they are gradients with a
        loss scale, whose steps are skipped.

        Args:
            trace: trace of the step.
            position: position of its batch in the data, from 0.
        """
        batch = self._spec.batch(position)
        may_overflow = ("gradients", "sums") if self._reference32.scales_loss else ()
        with np.errstate(invalid="ignore"):  # Of gradients that overflow.
            if self._is_as_expected(trace, batch) or not trace.is_finite(but=may_overflow):
                return None
        return self._measure(trace, batch)

    def _is_as_expected(self, trace: MemoryTrace, batch: Batch) -> bool:
        """Returns whether the step is correct according to the cheap comparisons."""
        step = trace.first_step
        shards, wrong = find_shards(trace, step, *batch)
        if any(wrong) or trace.have_copies_differed():
            return False
        if step == 1 and not self._is_start_right(trace):
            return False
        before = state_before(trace, step)
        return (
            self._are_sums_right(trace, step)
            and self._is_update_right(trace, step, before)
            and _all_within(averaged(trace, step))
            and self._are_gradients_right(trace, step, before, batch, shards)
        )

    def _is_start_right(self, trace: MemoryTrace) -> bool:
        """Returns whether the initial state is that of model, recipe and seed."""
        expected = self._reference32.initial_state
        return all(
            same_bits(trace.read(0, kind, item_id, tensor), expected[tensor])
            for kind in ("slots", "weights", "own statistics")
            for tensor in trace.tensors(0, kind)
            for item_id in trace.replicas(0, kind, tensor)
        )

    def _are_sums_right(self, trace: MemoryTrace, step: int) -> bool:
        for tensor in trace.tensors(step, "sums"):
            total = trace.read(step, "gradients", 0, tensor)
            for shard_id in range(1, trace.num_shards):
                total = total + trace.read(step, "gradients", shard_id, tensor)
            if not same_bits(total, trace.read(step, "sums", 0, tensor)):
                return _all_within(self._checker.summed(trace, step))
        return True

    def _is_update_right(self, trace: MemoryTrace, step: int, before: Arrays) -> bool:
        sums = {t: trace.read(step, "sums", 0, t) for t in trace.tensors(step, "sums")}
        after = self._reference32.update(before, sums)
        actual = (
            (tensor, trace.read(step, kind, 0, tensor))
            for kind in ("slots", "weights")
            for tensor in trace.tensors(step, kind)
        )
        if all(same_bits(array, after[tensor]) for tensor, array in actual):
            return True
        return _all_within(self._checker.updated(trace, step, before))

    def _are_gradients_right(
        self, trace: MemoryTrace, step: int, before: Arrays, batch: Batch, shards: list[np.ndarray]
    ) -> bool:
        """Compares loss, gradients and BatchNorm statistics of each shard."""
        per_shard = statistics_before(trace, step)
        results = self._reference32.gradients(
            before,
            *batch,
            rows_of_units(trace, shards),
            per_shard_statistics=[per_shard[unit[0]] for unit in trace.split.units],
        )
        for array in unit_arrays(trace, step):
            where: Where = (step, *array)
            actual, expected = read_of_unit(trace, where), pick(results, trace, array)
            if not same_bits(actual, expected) and not self._is_within_limit(
                array, actual, expected, results
            ):
                return False
        return True

    def _is_within_limit(
        self,
        array: tuple[str, str, int],
        actual: np.ndarray,
        expected: np.ndarray,
        results: list[ShardResult],
    ) -> bool:
        """Returns whether an array is as close to the reference as those of earlier steps.

        An array that was only rounding error in an earlier step is measured relative to the largest
        gradient.
        """
        kind, tensor, item_id = array
        if (kind, tensor) in self._limits:
            return relative_error(actual, expected) <= self._limits[kind, tensor]
        limit = max((x for (k, _), x in self._limits.items() if k == kind), default=0.0)
        if kind != "gradients" or not limit:
            return False
        largest = max(np.linalg.norm(g) for g in results[item_id].gradients.values())
        return bool(np.linalg.norm(actual - expected) <= limit * largest)

    @property
    def _checker(self) -> TraceChecker:
        """The checker that measures a step; creates its references on first use."""
        if self._measuring is None:
            config = self._spec.config
            self._measuring = TraceChecker.of(
                self._spec,
                syncs_batch_norm=config.distribution.batch_norm == "sync",
                communication_dtype=config.distribution.communication_dtype,
                reference32=self._reference32,
            )
        return self._measuring

    def _measure(self, trace: MemoryTrace, batch: Batch) -> Finding | None:
        """Measures all arrays of the step, and explains the first one out of tolerance."""
        step = trace.first_step
        measurements = list(
            self._checker.initial(trace) if step == 1 else replica_agreement(trace, step - 1)
        )
        of_step, samples = self._checker.check_step(trace, step, batch)
        known = [sample for of_one_step in self._samples for sample in of_one_step]
        limited = with_limits([*known, *samples])[len(known) :]
        measurements = sorted([*measurements, *of_step, *limited], key=lambda m: m.order)
        mismatch = first_mismatch(measurements)
        if mismatch is None:
            self._learn(samples, limited)
            return None
        context = StepContext(
            trace,
            measurements,
            lambda step: batch,
            functools.partial(hash_training_examples, self._spec),
            self._checker.reference64,
        )
        diagnosis = explain(context, mismatch)
        verdict = StrategyVerdict(
            self._strategy, measurements, mismatch, diagnosis, None, trace.split
        )
        finding = verdict.findings()[0]
        return dataclasses.replace(finding, where=finding.where.removeprefix("first at "))

    def _learn(self, samples: list[SummationSample], limited: list[Measurement]) -> None:
        """Keeps the effect of rounding on the reference in a correct step."""
        self._samples = [*self._samples, samples][-_KEPT_STEPS:]
        for each in limited:
            key = each.kind, each.tensor
            if each.limit < LARGEST_LIMIT:  # Otherwise only rounding errors, or 0.
                self._limits[key] = max(each.limit, self._limits.get(key, 0.0))


def _all_within(measurements: Iterator[Measurement]) -> bool:
    return all(measurement.within_tolerance for measurement in measurements)
