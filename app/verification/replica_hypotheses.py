"""Hypotheses about what a replica was given, and what it computed from that."""

from collections.abc import Iterator

import numpy as np

from app.verification.arithmetic import REDUCED_PRECISIONS, fit, has_values_of, scaling_mistakes
from app.verification.measurement import Measurement, relative_error
from app.verification.reference import Arrays
from app.verification.step_context import WHOLE_BATCH_NORM, StepContext, name_replicas
from app.verification.trace import hash_examples
from app.verification.verdict import Diagnosis


def examples(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    """Explains examples that were given twice, or not at all, or do not belong there."""
    images, labels = context.batch(mismatch.step)
    batch = hash_examples(images, labels)
    replicas = range(context.trace.num_shards)
    per_replica = [context.read(mismatch, "examples", r, "examples") for r in replicas]
    actual = per_replica[mismatch.replica_id]
    replica = f"replica {mismatch.replica_id}"
    if len(per_replica) > 1 and len(actual) == len(batch) and np.isin(batch, actual).all():
        yield Diagnosis("whole_batch", f"{replica} was given the whole global batch")
    for other in replicas:
        if other != mismatch.replica_id and np.isin(actual, per_replica[other]).all():
            yield Diagnosis(
                "repeated_shard",
                f"{replica} and replica {other} were given the same shard: all {len(actual)}"
                f" examples of {replica} went to both",
            )
    everything = np.concatenate(per_replica)
    left_out = np.count_nonzero(~np.isin(batch, everything))
    if left_out and np.isin(everything, batch).all() and len(everything) < len(batch):
        yield Diagnosis(
            "left_out",
            f"{left_out} of the batch's {len(batch)} examples were given to no replica, all"
            " others once",
        )
    if np.isin(actual, context.training_hashes()).all():
        yield Diagnosis(
            "other_order",
            f"{replica} draws in another order: of its {len(actual)} examples,"
            f" {np.count_nonzero(~np.isin(actual, batch))} belong to other batches of the"
            " training set",
        )
    yield Diagnosis(
        "other_examples",
        f"{replica} was given examples that are not in the training set: other images, other"
        " labels, or images that were changed on the way",
    )


def loss(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    """Explains a wrong loss; where the gradients are right, only the report of it is wrong."""
    if any(
        (m.step, m.kind) == (mismatch.step, "gradients") and not m.within_tolerance
        for m in context.measurements
    ):
        yield from gradients(context, mismatch)
        return
    before, images, labels, shards = context.start(mismatch)
    results = context.reference64.gradients(before, images, labels, shards)
    factor = (
        context.read(mismatch, "loss", mismatch.replica_id, "loss")
        / results[mismatch.replica_id].loss
    )
    yield Diagnosis(
        "wrong_loss",
        f"replica {mismatch.replica_id} reports {factor:.6g} times its part of the loss; its"
        " gradients are right",
    )


def gradients(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    """Explains gradients that are not those of the replica's shard and weights."""
    before, images, labels, shards = context.start(mismatch)
    results = context.reference64.gradients(before, images, labels, shards)
    right = [result.gradients for result in results]
    limits = {
        (m.tensor, m.replica_id): m.limit for m in context.measurements
        if (m.step, m.kind) == (mismatch.step, "gradients")
    }  # fmt: skip
    wrong = sorted({
        m.replica_id for m in context.measurements
        if (m.step, m.kind) == (mismatch.step, "gradients") and not m.within_tolerance
    })  # fmt: skip
    who = name_replicas(wrong, len(shards))
    actual = {r: context.arrays(mismatch, "gradients", r) for r in wrong}
    fitted = {r: float(fit(actual[r], [right[r]])[0]) for r in wrong}

    def is_scaled(replica: int, expected: Arrays, factor: float) -> bool:
        return all(
            relative_error(array, factor * expected[t]) <= limits[t, replica]
            for t, array in actual[replica].items()
            if limits[t, replica] < 1  # Of what is nothing but rounding nothing can be told.
        )

    if all(is_scaled(r, right[r], fitted[r]) for r in wrong):
        sizes = [len(shard) for shard in shards]
        yield _scaled_gradient(who, fitted, sizes, uncertainty=min(limits.values()))
    replica = mismatch.replica_id if mismatch.replica_id in wrong else wrong[0]
    for other in range(len(shards)):
        if other != replica and is_scaled(replica, right[other], 1.0):
            yield Diagnosis(
                "repeated_shard", f"replica {replica} computes the gradient of replica {other}"
            )
    if context.reference64.has_batch_norm and _is_gradient_of_whole_batch(
        context, mismatch, limits
    ):
        yield WHOLE_BATCH_NORM
    for name in REDUCED_PRECISIONS:
        if all(has_values_of(array, name) for array in actual[replica].values()):
            yield Diagnosis(
                "reduced_precision",
                f"{who} computes its gradient in {name}: it holds no other numbers",
            )


def _scaled_gradient(
    who: str, fitted: dict[int, float], sizes: list[int], *, uncertainty: float
) -> Diagnosis:
    """Says by which factors gradients are too large, and what computes such factors.

    Args:
        who: names the replicas.
        fitted: replica → factor of its gradient.
        sizes: examples of each replica's shard.
        uncertainty: relative error of the factors.
    """
    readings = [
        why for factors, why in scaling_mistakes(sizes)
        if all(abs(factor / factors[r] - 1) <= uncertainty for r, factor in fitted.items())
    ]  # fmt: skip
    shown = " and ".join(f"{factor:.6g}" for factor in sorted({*fitted.values()}))
    return Diagnosis(
        "scaled_gradient",
        f"{who} computes {shown} times its part of the gradient"
        + (f": {'; or '.join(readings)}" if readings else ""),
    )


def _is_gradient_of_whole_batch(context: StepContext, mismatch: Measurement, limits: dict) -> bool:
    """Whether the sum over the replicas is the gradient with the whole batch's statistics."""
    before, images, labels, shards = context.start(mismatch)
    (whole,) = context.reference64.gradients(before, images, labels, [np.arange(len(labels))])
    replicas = range(len(shards))
    actual = [context.arrays(mismatch, "gradients", replica_id) for replica_id in replicas]
    return all(
        relative_error(np.sum([arrays[t] for arrays in actual], axis=0), gradient)
        <= 2 * max(limits[t, r] for r in replicas)
        for t, gradient in whole.gradients.items()
    )
