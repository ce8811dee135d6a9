"""Checks a trace step by step, each step given the state before it.

Every step is compared with a step of the reference that starts from the trace's own state. Rounding
of earlier steps therefore does not accumulate, and the first mismatch originates in its own step.
Within a step, each stage is checked given its actual inputs.
"""

import collections
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from app.training.training_spec import TrainingSpec
from app.verification.arithmetic import REDUCED_PRECISIONS
from app.verification.measurement import SMALLEST, UNIT_ROUNDOFF, Measurement, Where, relative_error
from app.verification.reference import Arrays, Reference, ShardResult
from app.verification.step_start import (
    find_shards,
    rows_of_units,
    state_before,
    statistics_before,
)
from app.verification.tolerance import SummationSample, with_limits
from app.verification.trace import Trace

# Orders of summation of the float32 reference besides that of the batch: number of parts of each
# shard, with permuted examples. With BatchNorm no parts: each would be normalised separately.
_ORDERS = (1, 2)
_STEPS_IN_ALL_ORDERS = 3  # Later steps alternate; the limit is a maximum over all steps.
_ROUNDINGS_OF_AN_UPDATE = 8  # Per weight of SGD with Nesterov momentum and decay.


class TraceChecker:
    """Compares traces with the reference.

    Args:
        reference64: float64 reference, which represents the exact result.
        reference32: float32 reference, whose orders of summation show the effect of rounding.
        mean_of_squares: float32 reference with BatchNorm's variance as the mean of squares minus
            the square of the mean, as Keras computes it over devices, with larger rounding errors.
            Needed for traces with synchronised BatchNorm.
        communication_dtype: "float32" or "bfloat16", the dtype of the gradient all-reduce.
    """

    def __init__(
        self,
        reference64: Reference,
        reference32: Reference,
        *,
        mean_of_squares: Reference | None = None,
        communication_dtype: str = "float32",
    ):
        self.reference64, self.reference32 = reference64, reference32
        self._mean_of_squares = mean_of_squares
        self._communication_dtype = communication_dtype

    @classmethod
    def of(
        cls,
        spec: TrainingSpec,
        *,
        syncs_batch_norm: bool,
        communication_dtype: str,
        reference32: Reference | None = None,
    ) -> "TraceChecker":
        """Creates the checker of a training, with references of its own unless one is given."""
        synchronized = None
        if syncs_batch_norm:
            synchronized = Reference.of(spec, "float32", mean_of_squares=True)
        return cls(
            Reference.of(spec, "float64"),
            reference32 or Reference.of(spec, "float32"),
            mean_of_squares=synchronized,
            communication_dtype=communication_dtype,
        )

    def check(
        self,
        trace: Trace,
        batches: Iterable[tuple[np.ndarray, np.ndarray]],
        *,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> list[Measurement]:
        """Measures every array of every step, in the order of computation.

        Args:
            trace: trace of any strategy and split.
            batches: the expected global batches, from the first.
            on_step: called after each step.
        """
        measurements = list(self.initial(trace))
        samples: list[SummationSample] = []
        for step, batch in zip(range(1, trace.num_steps + 1), batches, strict=False):
            of_step, samples_of_step = self.check_step(trace, step, batch)
            measurements += of_step
            samples += samples_of_step
            on_step(step)
        return sorted([*measurements, *with_limits(samples)], key=lambda m: m.order)

    def check_step(
        self, trace: Trace, step: int, batch: tuple[np.ndarray, np.ndarray]
    ) -> tuple[list[Measurement], list[SummationSample]]:
        """Measures every array of one step.

        Args:
            trace: has the step and the state before it.
            step: number of the step.
            batch: the expected global batch.

        Returns:
            The measurements, and those whose limits `with_limits` computes.
        """
        with np.errstate(invalid="ignore"):  # Of gradients that overflow.
            return self._check_step(trace, step, batch)

    def _check_step(
        self, trace: Trace, step: int, batch: tuple[np.ndarray, np.ndarray]
    ) -> tuple[list[Measurement], list[SummationSample]]:
        before = state_before(trace, step)
        shards, wrong = find_shards(trace, step, *batch)
        measurements = [
            Measurement.counted((step, "examples", "examples", shard_id), count)
            for shard_id, count in enumerate(wrong)
        ]
        samples = list(self._computed(trace, step, before, batch, shards))
        measurements += self.summed(trace, step)
        measurements += self.updated(trace, step, before)
        measurements += replica_agreement(trace, step)
        measurements += averaged(trace, step)
        return measurements, samples

    def initial(self, trace: Trace) -> Iterator[Measurement]:
        """Measures the initial state, defined by model, recipe and seed, on every replica."""
        for kind in ("slots", "weights", "own statistics"):
            for tensor in trace.tensors(0, kind):
                for replica_id in trace.replicas(0, kind, tensor):
                    actual = trace.read(0, kind, replica_id, tensor)
                    expected = self.reference32.initial_state[tensor]
                    yield Measurement.of((0, kind, tensor, replica_id), actual, expected)

    def _computed(
        self,
        trace: Trace,
        step: int,
        before: Arrays,
        batch: tuple[np.ndarray, np.ndarray],
        shards: list[np.ndarray],
    ) -> Iterator[SummationSample]:
        """Measures loss, gradients and statistics of each shard for its actual examples."""
        per_shard = statistics_before(trace, step)
        own = [per_shard[unit[0]] for unit in trace.split.units]
        units = rows_of_units(trace, shards)
        arguments = before, *batch
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # float64 uses the other core.
            future = pool.submit(
                self.reference64.gradients, *arguments, units, per_shard_statistics=own
            )
            in_order = self.reference32.gradients(*arguments, units, per_shard_statistics=own)
            orders = list(self._other_orders(trace, step, before, batch, units, own))
            exact = future.result()
        spreads: dict[tuple, list[float]] = collections.defaultdict(list)
        for results in [in_order, *orders]:
            for array in unit_arrays(trace, step):
                error = relative_error(pick(results, trace, array), pick(exact, trace, array))
                spreads[array].append(error if np.isfinite(error) else 0.0)
        overflows = _overflowing_units(trace, step, [in_order, *orders])
        for array in unit_arrays(trace, step):
            kind, _, unit_id = array
            if kind == "gradients" and unit_id in overflows:
                continue
            expected, float32 = (pick(results, trace, array) for results in (exact, in_order))
            where = (step, *array)
            yield SummationSample(
                Measurement.of(where, read_of_unit(trace, where), expected, float32), spreads[array]
            )

    def _other_orders(
        self,
        trace: Trace,
        step: int,
        before: Arrays,
        batch: tuple[np.ndarray, np.ndarray],
        units: list[np.ndarray],
        own: list[Arrays],
    ) -> Iterator[list[ShardResult]]:
        """Yields the contributions of the units with their examples added in different orders."""
        generator = np.random.default_rng(step)
        for index, num_parts in enumerate(_ORDERS):
            permuted = [generator.permutation(unit) for unit in units]
            if step > _STEPS_IN_ALL_ORDERS and index != step % len(_ORDERS):
                continue
            num_parts = 1 if self.reference32.has_batch_norm else num_parts
            parts = [np.array_split(rows, num_parts) for rows in permuted]
            rows = [part for unit in parts for part in unit if len(part)]
            statistics = [own[i] for i, unit in enumerate(parts) for part in unit if len(part)]
            references = [self.reference32]
            if trace.split.syncs_batch_norm and self._mean_of_squares:
                references.append(self._mean_of_squares)
            for reference in references:
                results = reference.gradients(before, *batch, rows, per_shard_statistics=statistics)
                yield [_sum_of_parts([results.pop(0) for part in u if len(part)]) for u in parts]

    def summed(self, trace: Trace, step: int) -> Iterator[Measurement]:
        """Measures the sums of each replica against the gradients that were sent.

        Adding R numbers in any order rounds R − 1 times: the error of an element is at most
        (R − 1) · u / (1 − (R − 1) · u) times the sum of the magnitudes (Higham, "Accuracy and
        Stability of Numerical Algorithms", section 4.2). In a reduced precision, each number is
        first rounded once more.
        """
        unit, cast = float(UNIT_ROUNDOFF), 0
        if self._communication_dtype != "float32" and trace.num_shards > 1:
            unit, cast = REDUCED_PRECISIONS[self._communication_dtype][1], 1
        for tensor in trace.tensors(step, "sums"):
            sent = [
                trace.read(step, "gradients", replica_id, tensor)
                for replica_id in range(trace.num_shards)
            ]
            total = np.sum([g.astype(np.float64) for g in sent], axis=0)
            magnitude = np.sum([np.abs(g.astype(np.float64)) for g in sent], axis=0)
            roundings = (len(sent) - 1 + cast) * unit
            bound = roundings / (1 - roundings) * magnitude + SMALLEST
            for replica_id in trace.replicas(step, "sums", tensor):
                actual = trace.read(step, "sums", replica_id, tensor)
                where = (step, "sums", tensor, replica_id)
                # The sum of an overflow is one; which of infinite or NaN depends on the order.
                overflow = ~np.isfinite(total) & ~np.isfinite(actual)
                arrays = (actual, total, _add_in_order(sent), bound)
                yield Measurement.bounded(where, *(np.where(overflow, 1, a) for a in arrays))

    def updated(self, trace: Trace, step: int, before: Arrays) -> Iterator[Measurement]:
        """Measures weights and optimizer state after the step against the rule in float64."""
        sums = {
            tensor: trace.read(step, "sums", 0, tensor) for tensor in trace.tensors(step, "sums")
        }
        exact, float32 = (
            reference.update(before, sums) for reference in (self.reference64, self.reference32)
        )
        for kind in ("slots", "weights", "updates"):
            for tensor in trace.tensors(step, kind):
                expected, rounded, old = (x[tensor] for x in (exact, float32, before))
                if kind == "updates":
                    old64 = old.astype(np.float64)
                    expected, rounded = expected - old64, rounded - old64
                error = np.max(np.abs(float32[tensor] - exact[tensor]))
                magnitude = np.abs(old) + np.abs(exact[tensor])
                bound = _ROUNDINGS_OF_AN_UPDATE * (UNIT_ROUNDOFF * magnitude + error) + SMALLEST
                for replica_id in trace.replicas(step, kind, tensor):
                    actual = trace.read(step, kind, replica_id, tensor)
                    where = (step, kind, tensor, replica_id)
                    yield Measurement.bounded(where, actual, expected, rounded, bound)


def unit_arrays(trace: Trace, step: int) -> list[tuple[str, str, int]]:
    """Returns kind, tensor and unit, or shard, of all arrays computed from examples."""
    counts = {kind: len(trace.split.units) for kind in ("loss", "gradients")}
    counts["own statistics"] = trace.num_shards
    return [
        (kind, tensor, item_id)
        for kind, count in counts.items()
        for tensor in trace.tensors(step, kind)
        for item_id in range(count)
    ]


def _overflowing_units(
    trace: Trace, step: int, orders: Sequence[Sequence[ShardResult]]
) -> set[int]:
    """Returns the units whose gradients overflow, as they do in the reference in some order."""

    def overflow(gradients: Iterable[np.ndarray]) -> bool:
        return not all(np.isfinite(gradient).all() for gradient in gradients)

    return {
        unit_id
        for unit_id in range(len(trace.split.units))
        if any(overflow(results[unit_id].gradients.values()) for results in orders)
        and overflow(
            trace.read_unit(step, "gradients", unit_id, tensor)
            for tensor in trace.tensors(step, "gradients")
        )
    }


def pick(
    per_unit_results: list[ShardResult], trace: Trace, array: tuple[str, str, int]
) -> np.ndarray:
    """Returns the array for kind, tensor and unit, or shard, from the results of the reference."""
    kind, tensor, item_id = array
    if kind == "own statistics":
        return per_unit_results[trace.split.unit_of(item_id)].statistics[tensor]
    result = per_unit_results[item_id]
    return result.loss if kind == "loss" else result.gradients[tensor]


def read_of_unit(trace: Trace, where: Where) -> np.ndarray:
    """Returns the array of the training for a unit or a shard."""
    step, kind, tensor, item_id = where
    if kind == "own statistics":
        return trace.read(step, kind, item_id, tensor)
    return trace.read_unit(step, kind, item_id, tensor)


def replica_agreement(trace: Trace, step: int) -> Iterator[Measurement]:
    """Measures common values of replicas against replica 0; they must be bitwise identical."""
    for kind in ("sums", "slots", "weights"):
        for tensor in trace.tensors(step, kind):
            for replica_id in trace.replicas(step, kind, tensor)[1:]:
                actual, first = (trace.read(step, kind, r, tensor) for r in (replica_id, 0))
                where = (step, "agreement", f"{kind}/{tensor}", replica_id)
                yield Measurement.of(where, actual, first)


def averaged(trace: Trace, step: int) -> Iterator[Measurement]:
    """Measures the saved statistics against the mean of the replicas' statistics."""
    for tensor in trace.tensors(step, "statistics"):
        own = [
            trace.read(step, "own statistics", replica_id, tensor)
            for replica_id in range(trace.num_shards)
        ]
        actual = trace.read(step, "statistics", 0, tensor)
        mean = np.mean([array.astype(np.float64) for array in own], axis=0)
        magnitude = np.sum([np.abs(array.astype(np.float64)) for array in own], axis=0)
        bound = 2 * UNIT_ROUNDOFF * magnitude + SMALLEST
        rounded = np.mean(own, axis=0)
        yield Measurement.bounded((step, "statistics", tensor, 0), actual, mean, rounded, bound)


def _sum_of_parts(parts: list[ShardResult]) -> ShardResult:
    if len(parts) == 1:
        return parts[0]
    gradients = {
        name: _add_in_order([p.gradients[name] for p in parts]) for name in parts[0].gradients
    }
    return ShardResult(_add_in_order([part.loss for part in parts]), gradients, {})


def _add_in_order(arrays: list[np.ndarray]) -> np.ndarray:
    total = arrays[0]
    for array in arrays[1:]:
        total = total + array
    return total
