"""Tests hypotheses about trainings that split layers, tensors, weights or batches."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from app.verification.arithmetic import is_update
from app.verification.measurement import Measurement
from app.verification.reference import Arrays, ShardResult
from app.verification.split_layers import without_backward_sums
from app.verification.step_context import StepContext
from app.verification.step_start import state_before
from app.verification.verdict import Diagnosis
from strategies.collectives import shard_bounds

IsRight = Callable[[Sequence[ShardResult]], bool]


def gradients(
    context: StepContext, mismatch: Measurement, is_right: IsRight
) -> Iterator[Diagnosis]:
    """Explains gradients computed from other weights or by a wrong backward pass.

    Args:
        context: context of the step.
        mismatch: the first mismatch.
        is_right: returns whether all gradients of the step equal the given ones, within rounding.
    """
    if context.split.syncs_batch_norm:
        yield from _unsynced(context, mismatch, is_right)
    yield from _other_weights(context, mismatch, is_right)
    sizes = channels_of(context.trace.parts(), context.split.num_replicas)
    if sizes:
        forward = without_backward_sums(sizes)
        if is_right(context.compute(mismatch, forward=forward)):
            num_devices = len(next(iter(sizes.values())))
            yield Diagnosis(
                "forgotten_backward_sum",
                f"where a layer's input is gathered, each of {num_devices} devices keeps its own"
                " gradient by its channels instead of the sum over the devices: the loss is"
                " right, and so is the gradient of the last layer",
            )


def _unsynced(
    context: StepContext, mismatch: Measurement, is_right: IsRight
) -> Iterator[Diagnosis]:
    """Explains BatchNorm per shard instead of over the batch."""
    results = context.compute(mismatch, by_unit=False)
    total = {t: np.sum([r.gradients[t] for r in results], axis=0) for t in results[0].gradients}
    if is_right([ShardResult(np.sum([r.loss for r in results]), total, {})]):
        _, _, labels, shards = context.start(mismatch)
        sizes = sorted({len(shard) for shard in shards}, reverse=True)
        yield Diagnosis(
            "unsynced_batch_norm",
            f"BatchNorm normalises each shard of {' or '.join(map(str, sizes))} examples"
            f" separately; --batch_norm=sync asks for all {len(labels)} of the batch together",
        )


def _other_weights(
    context: StepContext, mismatch: Measurement, is_right: IsRight
) -> Iterator[Diagnosis]:
    """Explains gradients that belong to other weights than those of the step."""
    parts, split = context.trace.parts(), context.split
    before = state_before(context.trace, mismatch.step)
    of_device = _weights_of_devices(parts, split.num_replicas)
    if context.trace.tensors(mismatch.step - 2, "weights"):
        older = state_before(context.trace, mismatch.step - 1)
        stages = {f"stage {k}": names for k, names in enumerate(of_device)}
        weights = context.trace.tensors(mismatch.step, "weights")
        every_copy = split.name_items("weights", range(split.num_copies))
        for who, names in {**stages, every_copy: weights}.items():
            if is_right(
                context.compute(mismatch, state={**before, **{n: older[n] for n in names}})
            ):
                yield Diagnosis(
                    "stale_stage" if who.startswith("stage") else "stale_weights",
                    f"{who} computes with the weights of the step before: {_first_and_last(names)}"
                    " are those that the update of the last step should have replaced",
                )
    biases = {name: array for name, array in before.items() if name.endswith("bias")}
    num_devices = len(parts) // split.num_replicas
    if biases and num_devices > 1:
        repeated = {name: num_devices * array for name, array in biases.items()}
        if is_right(context.compute(mismatch, state={**before, **repeated})):
            yield Diagnosis(
                "repeated_bias",
                f"biases are added {num_devices} times, once by each device that computes a part"
                " of a layer",
            )
    for a, b in _pairs(split.num_replicas if len(parts) == split.num_replicas else 0):
        exchanged = _exchanged(before, context.trace.tensors(mismatch.step, "weights"), parts, a, b)
        if is_right(context.compute(mismatch, state={**before, **exchanged})):
            yield _wrong_shard(a, b)


def updated_weights(
    context: StepContext, mismatch: Measurement, before: Arrays, exact: Arrays
) -> Iterator[Diagnosis]:
    """Explains weights that were gathered wrongly after the update.

    Args:
        context: context of the step.
        mismatch: the first mismatch.
        before: weights before the step.
        exact: expected weights after the update.
    """
    parts, num_replicas = context.trace.parts(), context.split.num_replicas
    actual = context.arrays(mismatch, "updates", mismatch.replica_id)
    for a, b in _pairs(num_replicas if len(parts) == num_replicas else 0):
        exchanged = _exchanged(exact, list(actual), parts, a, b)
        if is_update(actual, before, {t: array - before[t] for t, array in exchanged.items()}):
            yield _wrong_shard(a, b)


def _wrong_shard(a: int, b: int) -> Diagnosis:
    return Diagnosis(
        "wrong_shard",
        f"the weights that are gathered have the parts of device {a} and device {b} swapped",
    )


def _pairs(count: int) -> Iterator[tuple[int, int]]:
    return itertools.combinations(range(count), 2)


def _exchanged(
    arrays: Mapping[str, np.ndarray],
    names: Sequence[str],
    parts: Sequence[Mapping[str, tuple[int, ...]]],
    a: int,
    b: int,
) -> Arrays:
    """Returns arrays in which the ranges of elements of two devices are swapped."""
    exchanged = {}
    for name in names:
        flat = arrays[name].ravel()
        bounds = [shard_bounds(flat.size, len(parts), d) for d in range(len(parts))]
        ranges = [flat[start:end] for start, end in bounds]
        ranges[a], ranges[b] = ranges[b], ranges[a]
        exchanged[name] = np.concatenate(ranges).reshape(arrays[name].shape)
    return exchanged


def _weights_of_devices(
    parts: Sequence[Mapping[str, tuple[int, ...]]], num_replicas: int
) -> list[list[str]]:
    """Returns the weights of each device of a replica, for a pipeline's stages."""
    of_replica = [list(part) for part in parts[: len(parts) // num_replicas]]
    names = [name for part in of_replica for name in part]
    return of_replica if len(of_replica) > 1 and len(set(names)) == len(names) else []


def channels_of(
    parts: Sequence[Mapping[str, tuple[int, ...]]], num_replicas: int
) -> dict[str, list[int]]:
    """Returns weight → its output channels on each device of a replica; empty for other splits."""
    of_replica = parts[: len(parts) // num_replicas]
    if len(of_replica) < 2 or any(set(part) != set(of_replica[0]) for part in of_replica):
        return {}
    return {name: [part[name][-1] for part in of_replica] for name in of_replica[0]}


def _first_and_last(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
