"""Checks a trace step by step: is each step what it should be, given the state before it?

Every step is compared with a step of the reference that starts from the trace's own state. So
nothing that rounding did in earlier steps is counted again, and the first mismatch arises in its
own step. Within a step each stage is checked given what went into it.
"""

import collections
import concurrent.futures
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from app.verification.arithmetic import REDUCED_PRECISIONS
from app.verification.measurement import SMALLEST, UNIT_ROUNDOFF, Measurement, Where, relative_error
from app.verification.reference import Arrays, Reference, ShardResult
from app.verification.tolerance import SummationSample, with_limits
from app.verification.trace import Trace, hash_examples

# Orders of summation of the float32 reference: into how many parts each shard is cut, besides
# permuting its examples. BatchNorm forbids cuts: a part would be normalised by itself.
_ORDERS = (1, 2, 4)
_ROUNDINGS_OF_AN_UPDATE = 8  # SGD with Nesterov's momentum and decay rounds as often, a weight.


class TraceChecker:
    """Compares traces with the reference.

    Args:
        reference64: in float64, which stands for the exact result.
        reference32: in float32, whose orders of summation show what rounding does.
        communication_dtype: "float32" or "bfloat16", the dtype of the gradient all-reduce.
    """

    def __init__(
        self,
        reference64: Reference,
        reference32: Reference,
        *,
        communication_dtype: str = "float32",
    ):
        self.reference64, self.reference32 = reference64, reference32
        self._communication_dtype = communication_dtype

    def check(
        self,
        trace: Trace,
        batches: Iterable[tuple[np.ndarray, np.ndarray]],
        *,
        on_step: Callable[[int], None] = lambda step: None,
    ) -> list[Measurement]:
        """Measures every array of every step, in the order in which it was computed.

        Args:
            trace: of any strategy and number of replicas.
            batches: the global batches that it was to train on, from the first on.
            on_step: called after each step.
        """
        measurements = list(self._initial(trace))
        samples: list[SummationSample] = []
        for step, (images, labels) in zip(range(1, trace.num_steps + 1), batches, strict=False):
            before = state_before(trace, step)
            shards, wrong = find_shards(trace, step, images, labels)
            measurements += [
                Measurement.counted((step, "examples", "examples", replica_id), count)
                for replica_id, count in enumerate(wrong)
            ]
            samples += self._computed(trace, step, before, images, labels, shards)
            measurements += self._summed(trace, step)
            measurements += self._updated(trace, step, before)
            measurements += _replica_agreement(trace, step)
            measurements += _averaged(trace, step)
            on_step(step)
        return sorted([*measurements, *with_limits(samples)], key=lambda m: m.order)

    def _initial(self, trace: Trace) -> Iterator[Measurement]:
        """Step 0: what model, recipe and seed define, on every replica."""
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
        images: np.ndarray,
        labels: np.ndarray,
        shards: list[np.ndarray],
    ) -> Iterator[SummationSample]:
        """Loss, gradients and own statistics, each replica's from the shard that it was given."""
        with concurrent.futures.ThreadPoolExecutor(1) as pool:  # float64 takes the other core.
            own = statistics_before(trace, step)
            arguments = before, images, labels, shards
            future = pool.submit(self.reference64.gradients, *arguments, per_shard_statistics=own)
            in_order = self.reference32.gradients(*arguments, per_shard_statistics=own)
            orders = list(self._other_orders(step, before, images, labels, shards, own))
            exact = future.result()
        spreads: dict[tuple, list[float]] = collections.defaultdict(list)
        for results in orders:
            for array in _arrays(trace, step):
                error = relative_error(_pick(results, array), _pick(exact, array))
                spreads[array].append(error)
        for array in _arrays(trace, step):
            expected, float32 = _pick(exact, array), _pick(in_order, array)
            where = (step, *array)
            yield SummationSample(
                Measurement.of(where, _read(trace, where), expected, float32), spreads[array]
            )

    def _other_orders(
        self,
        step: int,
        before: Arrays,
        images: np.ndarray,
        labels: np.ndarray,
        shards: list[np.ndarray],
        own: list[Arrays],
    ) -> Iterator[list[ShardResult]]:
        """Yields what each shard contributes, its examples added in one order after another."""
        generator = np.random.default_rng(step)
        for num_parts in _ORDERS:
            num_parts = 1 if self.reference32.has_batch_norm else num_parts
            parts = [np.array_split(generator.permutation(s), num_parts) for s in shards]
            results = self.reference32.gradients(
                before,
                images,
                labels,
                [part for shard in parts for part in shard if len(part)],
                per_shard_statistics=[
                    own[r] for r, shard in enumerate(parts) for part in shard if len(part)
                ],
            )
            yield [_sum_of_parts([results.pop(0) for part in s if len(part)]) for s in parts]

    def _summed(self, trace: Trace, step: int) -> Iterator[Measurement]:
        """The sums that each replica got, against the gradients that were sent.

        Adding R numbers in any order rounds R − 1 times: the error of an element is at most
        (R − 1) · u / (1 − (R − 1) · u) times the sum of the magnitudes (Higham, "Accuracy and
        Stability of Numerical Algorithms", section 4.2). In a reduced precision each of them is
        rounded once more before.
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
                yield Measurement.bounded(where, actual, total, _add_in_order(sent), bound)

    def _updated(self, trace: Trace, step: int, before: Arrays) -> Iterator[Measurement]:
        """Weights and slots after the step, against the optimizer's rule in float64."""
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


def _arrays(trace: Trace, step: int) -> list[tuple[str, str, int]]:
    """Returns kind, tensor and replica of all that each replica computes from its shard."""
    return [
        (kind, tensor, replica_id)
        for kind in ("loss", "gradients", "own statistics")
        for tensor in trace.tensors(step, kind)
        for replica_id in range(trace.num_shards)
    ]


def _pick(results: list[ShardResult], array: tuple[str, str, int]) -> np.ndarray:
    kind, tensor, replica_id = array
    result = results[replica_id]
    if kind == "loss":
        return result.loss
    return (result.gradients if kind == "gradients" else result.statistics)[tensor]


def _read(trace: Trace, where: Where) -> np.ndarray:
    step, kind, tensor, replica_id = where
    return trace.read(step, kind, replica_id, tensor)


def state_before(trace: Trace, step: int) -> Arrays:
    """Returns what a step starts from: replica 0's weights and slots, and the statistics."""
    return {
        tensor: trace.read(step - 1, kind, 0, tensor)
        for kind in ("weights", "slots", "statistics")
        for tensor in trace.tensors(step - 1, kind)
    }


def statistics_before(trace: Trace, step: int) -> list[Arrays]:
    """Returns the moving statistics that each shard of a step starts from."""
    kind = "own statistics"
    return [
        {t: trace.read(step - 1, kind, shard_id, t) for t in trace.tensors(step - 1, kind)}
        for shard_id in range(trace.num_shards)
    ]


def find_shards(
    trace: Trace, step: int, images: np.ndarray, labels: np.ndarray
) -> tuple[list[np.ndarray], list[int]]:
    """Finds out which rows of the global batch each replica was given.

    However a strategy cuts the batch, every example has to be given out once.

    Returns:
        For each replica, its rows, in its order; and how many of its examples are wrong: of another
        batch, or given out before. Where any is wrong the rows are those of an even cut.
    """
    rows_of: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
    for row, example in enumerate(hash_examples(images, labels)):
        rows_of[int(example)].append(row)
    shards, wrong = [], []
    for replica_id in range(trace.num_shards):
        examples = trace.read(step, "examples", replica_id, "examples")
        rows = [
            rows_of[int(example)].popleft() if rows_of[int(example)] else None
            for example in examples
        ]
        shards.append(np.array([row for row in rows if row is not None], np.int64))
        wrong.append(rows.count(None))
    left_out = len(labels) - sum(len(shard) for shard in shards)
    if left_out or any(wrong):
        if not any(wrong):
            wrong[-1] = left_out
        return np.array_split(np.arange(len(labels)), trace.num_shards), wrong
    return shards, wrong


def _replica_agreement(trace: Trace, step: int) -> Iterator[Measurement]:
    """What replicas hold in common, against replica 0: it has to be the same bits."""
    for kind in ("sums", "slots", "weights"):
        for tensor in trace.tensors(step, kind):
            for replica_id in trace.replicas(step, kind, tensor)[1:]:
                actual, first = (trace.read(step, kind, r, tensor) for r in (replica_id, 0))
                where = (step, "agreement", f"{kind}/{tensor}", replica_id)
                yield Measurement.of(where, actual, first)


def _averaged(trace: Trace, step: int) -> Iterator[Measurement]:
    """The statistics that are saved, against the mean of the replicas' own."""
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
