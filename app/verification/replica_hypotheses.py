"""Tests hypotheses about the examples of a replica and its computations."""

from collections.abc import Iterator

import numpy as np

from app.verification import split_hypotheses
from app.verification.arithmetic import (
    REDUCED_PRECISIONS,
    fit,
    has_values_of,
    name_scaling,
    scaling_mistakes,
)
from app.verification.measurement import Measurement, relative_error
from app.verification.reference import Arrays
from app.verification.split import Split
from app.verification.step_context import WHOLE_BATCH_NORM, StepContext
from app.verification.trace import hash_examples
from app.verification.verdict import Diagnosis


def examples(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    """Explains examples that are repeated, missing, or from another batch."""
    images, labels = context.batch(mismatch.step)
    batch = hash_examples(images, labels)
    replicas, name = range(context.trace.num_shards), context.split.name_shard
    per_replica = [context.read(mismatch, "examples", r, "examples") for r in replicas]
    actual = per_replica[mismatch.replica_id]
    replica = name(mismatch.replica_id)
    if len(per_replica) > 1 and len(actual) == len(batch) and np.isin(batch, actual).all():
        yield Diagnosis("whole_batch", f"{replica} received the whole global batch")
    for other in replicas:
        if other != mismatch.replica_id and np.isin(actual, per_replica[other]).all():
            yield Diagnosis(
                "repeated_shard",
                f"{replica} and {name(other)} received the same shard of {len(actual)} examples",
            )
    everything = np.concatenate(per_replica)
    left_out = np.count_nonzero(~np.isin(batch, everything))
    if left_out and np.isin(everything, batch).all() and len(everything) < len(batch):
        yield Diagnosis(
            "left_out",
            f"{left_out} of the batch's {len(batch)} examples were received by no"
            f" {context.split.shard_noun}, each of the others once",
        )
    if np.isin(actual, context.training_hashes()).all():
        yield Diagnosis(
            "other_order",
            f"{replica} has another order of examples: of its {len(actual)} examples,"
            f" {np.count_nonzero(~np.isin(actual, batch))} belong to other batches of the"
            " training set",
        )
    yield Diagnosis(
        "other_examples",
        f"{replica} received examples that are not in the training set: different images or"
        " labels, or images that were changed",
    )


def loss(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    """Explains a wrong loss; if the gradients are right, only the reported loss is wrong."""
    if any(
        (m.step, m.kind) == (mismatch.step, "gradients") and not m.within_tolerance
        for m in context.measurements
    ):
        yield from gradients(context, mismatch)
        return
    unit = mismatch.replica_id
    factor = (
        context.trace.read_unit(mismatch.step, "loss", unit, "loss")
        / context.compute(mismatch)[unit].loss
    )
    yield Diagnosis(
        "wrong_loss",
        f"{context.split.name_items('loss', [unit])} reports {factor:.6g} times its part of the"
        " loss; its gradients are right",
    )


def gradients(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    """Explains gradients that do not belong to the shards and weights, for each unit separately."""
    right = [result.gradients for result in context.compute(mismatch)]
    measured = [m for m in context.measurements if (m.step, m.kind) == (mismatch.step, "gradients")]
    limits = {(m.tensor, m.replica_id): m.limit for m in measured}
    wrong = sorted({m.replica_id for m in measured if not m.within_tolerance})
    who = context.split.name_items("gradients", wrong)
    actual = {unit: context.gradients_of(mismatch, unit) for unit in range(len(right))}
    fitted = {unit: float(fit(actual[unit], [right[unit]])[0]) for unit in wrong}

    def is_scaled(unit: int, expected: Arrays, factor: float = 1.0) -> bool:
        return all(
            relative_error(array, factor * expected[t]) <= limits[t, unit]
            for t, array in actual[unit].items()
            if limits[t, unit] < 1  # Rounding errors alone are not conclusive.
        )

    if all(is_scaled(unit, right[unit], fitted[unit]) for unit in wrong):
        _, _, _, shards = context.start(mismatch)
        sizes = [len(shard) for shard in shards]
        yield _scaled_gradient(context.split, fitted, sizes, uncertainty=min(limits.values()))
    unit = mismatch.replica_id if mismatch.replica_id in wrong else wrong[0]
    for other in range(len(right)):
        if other != unit and is_scaled(unit, right[other]):
            names = [context.split.name_shard(u) for u in (unit, other)]
            yield Diagnosis("repeated_shard", f"{names[0]} computes the gradient of {names[1]}")
    yield from split_hypotheses.gradients(
        context,
        mismatch,
        lambda results: all(is_scaled(u, result.gradients) for u, result in enumerate(results)),
    )
    normalises_shards = context.reference64.has_batch_norm and not context.split.syncs_batch_norm
    if normalises_shards and _is_gradient_of_whole_batch(context, mismatch, limits):
        yield WHOLE_BATCH_NORM
    for name in REDUCED_PRECISIONS:
        if all(has_values_of(array, name) for array in actual[unit].values()):
            yield Diagnosis(
                "reduced_precision",
                f"{who} computes its gradient in {name}: all of its values are {name} numbers",
            )


def _scaled_gradient(
    split: Split, fitted: dict[int, float], sizes: list[int], *, uncertainty: float
) -> Diagnosis:
    """Names the factors of too large gradients, and their cause.

    Args:
        split: split of the training.
        fitted: unit → factor of its gradient.
        sizes: number of examples of each shard.
        uncertainty: relative error of the factors.
    """
    readings = [
        why for factors, why in scaling_mistakes(sizes, split)
        if all(abs(factor / factors[unit] - 1) <= uncertainty for unit, factor in fitted.items())
    ]  # fmt: skip
    shown = " and ".join(f"{factor:.6g}" for factor in sorted({*fitted.values()}))
    causes = {name_scaling(f, split, uncertainty=uncertainty) for f in fitted.values()}
    return Diagnosis(
        causes.pop() if len(causes) == 1 else "scaled_gradient",
        f"{split.name_items('gradients', list(fitted))} computes {shown} times its part of the"
        f" gradient" + (f": {'; or '.join(readings)}" if readings else ""),
    )


def _is_gradient_of_whole_batch(context: StepContext, mismatch: Measurement, limits: dict) -> bool:
    """Returns whether the replicas' sum is the gradient with the statistics of the whole batch."""
    before, images, labels, shards = context.start(mismatch)
    (whole,) = context.reference64.gradients(before, images, labels, [np.arange(len(labels))])
    replicas = range(len(shards))
    actual = [context.arrays(mismatch, "gradients", replica_id) for replica_id in replicas]
    return all(
        relative_error(np.sum([arrays[t] for arrays in actual], axis=0), gradient)
        <= 2 * max(limits[t, r] for r in replicas)
        for t, gradient in whole.gradients.items()
    )
