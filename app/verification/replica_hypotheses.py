"""Hypotheses about what a replica was given, and what it computed from that."""

from collections.abc import Iterator

import numpy as np

from app.verification.arithmetic import REDUCED_PRECISIONS, fit, has_values_of, telling_factors
from app.verification.measurement import Measurement, relative_error
from app.verification.reference import Arrays
from app.verification.step_context import WHOLE_BATCH_NORM, StepContext, name_replicas
from app.verification.trace import hash_examples
from app.verification.verdict import Diagnosis


def examples(context: StepContext, false: Measurement) -> Iterator[Diagnosis]:
    """Explains examples that were given twice, or not at all, or do not belong there."""
    images, labels = context.batch(false.step)
    batch = hash_examples(images, labels)
    replicas = range(context.trace.num_replicas)
    per_replica = [context.read(false, "examples", r, "examples") for r in replicas]
    held = per_replica[false.replica_id]
    replica = f"replica {false.replica_id}"
    if len(per_replica) > 1 and len(held) == len(batch) and np.isin(batch, held).all():
        yield Diagnosis("whole_batch", f"{replica} was given the whole global batch")
    for other in replicas:
        if other != false.replica_id and np.isin(held, per_replica[other]).all():
            yield Diagnosis(
                "repeated_shard",
                f"{replica} and replica {other} were given the same shard: all {len(held)}"
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
    if np.isin(held, context.training_hashes()).all():
        yield Diagnosis(
            "other_order",
            f"{replica} draws in another order: of its {len(held)} examples,"
            f" {np.count_nonzero(~np.isin(held, batch))} belong to other batches of the"
            " training set",
        )
    yield Diagnosis(
        "other_examples",
        f"{replica} was given examples that are not in the training set: other images, other"
        " labels, or images that were changed on the way",
    )


def loss(context: StepContext, false: Measurement) -> Iterator[Diagnosis]:
    """A false loss with right gradients is merely reported falsely."""
    if any(
        (m.step, m.kind) == (false.step, "gradients") and not m.holds for m in context.measurements
    ):
        yield from gradients(context, false)
        return
    before, images, labels, shards = context.start(false)
    results = context.reference64.gradients(before, images, labels, shards)
    factor = context.read(false, "loss", false.replica_id, "loss") / results[false.replica_id].loss
    yield Diagnosis(
        "false_loss",
        f"replica {false.replica_id} reports {factor:.6g} times its part of the loss; its"
        " gradients are right",
    )


def gradients(context: StepContext, false: Measurement) -> Iterator[Diagnosis]:
    """Explains gradients that are not those of the replica's shard and weights."""
    before, images, labels, shards = context.start(false)
    results = context.reference64.gradients(before, images, labels, shards)
    right = [result.gradients for result in results]
    limits = {
        (m.tensor, m.replica_id): m.limit for m in context.measurements
        if (m.step, m.kind) == (false.step, "gradients")
    }  # fmt: skip
    wrong = sorted({
        m.replica_id for m in context.measurements
        if (m.step, m.kind) == (false.step, "gradients") and not m.holds
    })  # fmt: skip
    who = name_replicas(wrong, len(shards))
    held = {r: context.arrays(false, "gradients", r) for r in wrong}
    fitted = {r: float(fit(held[r], [right[r]])[0]) for r in wrong}

    def is_scaled(replica: int, expected: Arrays, factor: float) -> bool:
        return all(
            relative_error(array, factor * expected[t]) <= limits[t, replica]
            for t, array in held[replica].items()
            if limits[t, replica] < 1  # Of what is nothing but rounding nothing can be told.
        )

    if all(is_scaled(r, right[r], fitted[r]) for r in wrong):
        uncertainty = min(limit for limit in limits.values())
        sizes = [len(shard) for shard in shards]
        readings = [
            why for factors, why in telling_factors(sizes)
            if all(abs(fitted[r] / factors[r] - 1) <= uncertainty for r in wrong)
        ]  # fmt: skip
        shown = " and ".join(f"{factor:.6g}" for factor in sorted({*fitted.values()}))
        yield Diagnosis(
            "scaled_gradient",
            f"{who} computes {shown} times its part of the gradient"
            + (f": {'; or '.join(readings)}" if readings else ""),
        )
    replica = false.replica_id if false.replica_id in wrong else wrong[0]
    for other in range(len(shards)):
        if other != replica and is_scaled(replica, right[other], 1.0):
            yield Diagnosis(
                "repeated_shard", f"replica {replica} computes the gradient of replica {other}"
            )
    if context.reference64.has_batch_norm and _is_gradient_of_whole_batch(context, false, limits):
        yield WHOLE_BATCH_NORM
    for name in REDUCED_PRECISIONS:
        if all(has_values_of(array, name) for array in held[replica].values()):
            yield Diagnosis(
                "reduced_precision",
                f"{who} computes its gradient in {name}: it holds no other numbers",
            )


def _is_gradient_of_whole_batch(context: StepContext, false: Measurement, limits: dict) -> bool:
    """Whether the sum over the replicas is the gradient with the whole batch's statistics."""
    before, images, labels, shards = context.start(false)
    (whole,) = context.reference64.gradients(before, images, labels, [np.arange(len(labels))])
    replicas = range(len(shards))
    held = [context.arrays(false, "gradients", replica_id) for replica_id in replicas]
    return all(
        relative_error(np.sum([arrays[t] for arrays in held], axis=0), gradient)
        <= 2 * max(limits[t, r] for r in replicas)
        for t, gradient in whole.gradients.items()
    )
