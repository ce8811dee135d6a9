"""Explains a mismatch by the first hypothesis that a computation confirms.

Most hypotheses predict all arrays of the mismatch, and hold if the arrays equal the prediction
within rounding in every tensor; others count examples or changed values.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from app.verification import replica_hypotheses, split_hypotheses
from app.verification.arithmetic import (
    REDUCED_PRECISIONS,
    Arrays,
    fit,
    is_reduced,
    is_update,
    is_weighted_sum,
    name_scaling,
    scaling_mistakes,
    show_sizes,
)
from app.verification.measurement import Measurement, relative_error
from app.verification.split import Split
from app.verification.step_context import WHOLE_BATCH_NORM, StepContext
from app.verification.step_start import state_before, statistics_before
from app.verification.verdict import NO_CAUSE, Diagnosis

UNEXPLAINED = Diagnosis(
    NO_CAUSE,
    "no known cause explains the difference; tried: scaling, a mean of means, a lost or repeated"
    " gradient or shard, another order of examples, BatchNorm's statistics, reduced precision, a"
    " scaled update, stale or swapped weights, a missing sum, repeated biases",
)


def explain(context: StepContext, mismatch: Measurement) -> Diagnosis:
    """Returns the first hypothesis that explains `mismatch`, the first mismatch of its trace."""
    tests = {
        "examples": replica_hypotheses.examples,
        "loss": replica_hypotheses.loss,
        "gradients": replica_hypotheses.gradients,
        "sums": _sums,
        "own statistics": _own_statistics,
        "statistics": _statistics,
    }
    test = tests.get(mismatch.kind, _update) if mismatch.step else _initial_state
    return next(test(context, mismatch), UNEXPLAINED)


def _sums(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    split, shards = context.split, range(context.trace.num_shards)
    sizes = [len(context.read(mismatch, "examples", s, "examples")) for s in shards]
    sent = [context.arrays(mismatch, "gradients", shard_id) for shard_id in shards]
    got = context.arrays(mismatch, "sums", mismatch.replica_id)
    overflowing = [s for s in shards if not _are_finite(sent[s])]
    if overflowing and _are_finite(got):
        yield Diagnosis(
            "overflow_not_skipped",
            f"the gradient of {split.name_shard(overflowing[0])} overflows in float16, but the sum"
            " is finite: the step is not skipped",
        )
    yield from _lost_or_repeated(split, got, sent)
    yield from _mean_of_means(split, got, sent, sizes)
    weights = fit(got, sent).tolist()
    factor = float(np.mean(weights))
    if is_weighted_sum(got, sent, [factor] * len(sent)):
        readings = [
            why for factors, why in scaling_mistakes(sizes, split)
            if all(abs(factor / f - 1) < 1e-6 for f in factors)
        ]  # fmt: skip
        yield Diagnosis(
            name_scaling(factor, split, uncertainty=1e-6),
            f"the sum is {factor:.6g} times what it should be"
            + (f": {'; or '.join(readings)}" if readings else ""),
        )
    for name in REDUCED_PRECISIONS:
        if is_reduced(got, sent, name):
            yield Diagnosis(
                "reduced_precision", f"the gradients are all-reduced in {name}, not in float32"
            )
    if is_weighted_sum(got, sent, weights):
        terms = " + ".join(f"{w:.4g} × {split.name_shard(s)}" for s, w in enumerate(weights))
        yield Diagnosis("weighted_sum", f"the sum is {terms}")


def _lost_or_repeated(split: Split, got: Arrays, sent: Sequence[Arrays]) -> Iterator[Diagnosis]:
    """Explains a sum that lacks or repeats a replica, or a micro-batch of one or all replicas."""
    num, shards = split.shards_per_replica, range(split.num_shards)
    groups = {f"replica {r}": range(r * num, (r + 1) * num) for r in range(split.num_replicas)} | {
        split.name_shard(shard): range(shard, shard + 1) for shard in shards
    }
    if num > 1 and split.num_replicas > 1:
        groups |= {f"micro-batch {m} of every replica": shards[m::num] for m in range(num)}
    for who, group in groups.items():
        if len(group) == len(shards):
            continue
        cause = "lost_micro_batch" if who.startswith("micro") else "lost_gradient"
        if is_weighted_sum(got, sent, [float(s not in group) for s in shards]):
            yield Diagnosis(cause, f"the sum does not contain the gradient of {who}")
    for who, group in groups.items():
        if len(group) < len(shards) and is_weighted_sum(
            got, sent, [1.0 + (s in group) for s in shards]
        ):
            yield Diagnosis("repeated_gradient", f"the sum contains the gradient of {who} twice")


def _mean_of_means(
    split: Split, got: Arrays, sent: Sequence[Arrays], sizes: Sequence[int]
) -> Iterator[Diagnosis]:
    """Explains a mean over parts of different sizes that gives them equal weight."""
    num = split.shards_per_replica
    of_replicas = [sum(sizes[i : i + num]) for i in range(0, len(sizes), num)]
    for noun, parts in (("replica", of_replicas), (split.shard_noun, sizes)):
        per_part = len(sizes) // len(parts)
        means = [sum(sizes) / (len(parts) * parts[s // per_part]) for s in range(len(sizes))]
        if len(set(parts)) > 1 and is_weighted_sum(got, sent, means):
            shown = show_sizes(parts)
            whose = "replicas'" if noun == "replica" else "micro-batches'"
            yield Diagnosis(
                "mean_of_means",
                f"the mean of the {whose} means, not the mean of the batch: shards of"
                f" {shown} examples weigh the same",
            )


def _are_finite(arrays: Arrays) -> bool:
    return all(np.isfinite(array).all() for array in arrays.values())


def _update(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    sums = context.arrays(mismatch, "sums", 0)
    if not _are_finite(sums):
        yield Diagnosis(
            "overflow_not_skipped",
            "a gradient overflows in float16, so that every device must skip the step and halve the"
            " loss scale; they do not all do so",
        )
    kind, tensor = "slots" if mismatch.kind == "slots" else "weights", mismatch.tensor
    if mismatch.kind == "agreement":
        kind, _, tensor = tensor.partition("/")
    if kind == "sums":
        yield Diagnosis(
            "unequal_sums",
            "replicas received sums that differ by rounding: they add in different orders, and"
            " their weights diverge",
        )
    wrong = context.wrong_replicas(mismatch, kind, tensor)
    if len(wrong) < context.trace.num_copies:
        yield _changed_outside_update(context, mismatch, kind, tensor, wrong)
    before = state_before(context.trace, mismatch.step)
    if "iteration" in context.trace.tensors(mismatch.step, "slots"):
        made = context.read(mismatch, "slots", 0, "iteration") - before["iteration"]
        if made != 1:
            yield Diagnosis("scaled_update", f"the optimizer was applied {made} times in one step")
    exact = context.reference64.update(before, sums)
    yield from split_hypotheses.updated_weights(context, mismatch, before, exact)
    expected = {t: exact[t] - before[t] for t in sums}
    actual = context.arrays(mismatch, "updates", mismatch.replica_id)
    (factor,) = fit(actual, [expected])
    if is_update(actual, before, {t: factor * array for t, array in expected.items()}):
        yield Diagnosis(
            "scaled_update",
            f"the update is {factor:.5g} times what the optimizer computes from the sum: another"
            " learning rate, or an update that is applied more than once",
        )


def _changed_outside_update(
    context: StepContext, mismatch: Measurement, kind: str, tensor: str, wrong: list[int]
) -> Diagnosis:
    """Describes the difference between one replica and the correct ones."""
    right = next(r for r in range(context.trace.num_copies) if r not in wrong)
    actual, expected = (
        context.read(mismatch, kind, r, tensor).astype(np.float64).ravel()
        for r in (mismatch.replica_id, right)
    )
    at = int(np.argmax(np.abs(actual - expected)))
    is_recorded = context.trace.tensors(mismatch.step, "sums")
    when = (
        "the sum that it received was right" if is_recorded else "in a step that was not recorded"
    )
    return Diagnosis(
        "changed_outside_update",
        f"replica {mismatch.replica_id} changed outside of the update:"
        f" {np.count_nonzero(actual != expected)} of {actual.size} elements of {tensor}, number"
        f" {at} by {actual[at] - expected[at]:.6g}; {when}",
    )


def _initial_state(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    wrong = context.wrong_replicas(mismatch, mismatch.kind, mismatch.tensor)
    what = {"weights": "weights", "slots": "optimizer state"}.get(mismatch.kind, mismatch.kind)
    yield Diagnosis(
        "initial_weights" if mismatch.kind == "weights" else "initial_state",
        f"{context.split.name_items(mismatch.kind, wrong)} starts from different {what} than"
        f" the model, recipe and flags define: {mismatch.tensor}, by up to {mismatch.absolute:.3g}",
    )


def _own_statistics(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    before, images, labels, shards = context.start(mismatch)
    shard_id, tensor, split = mismatch.replica_id, mismatch.tensor, context.split
    actual = context.read(mismatch, "own statistics", shard_id, tensor)
    own = statistics_before(context.trace, mismatch.step)[shard_id]
    if np.array_equal(actual, own[tensor]):
        yield Diagnosis(
            "frozen_batch_norm",
            f"{split.name_shard(shard_id)} does not update {tensor}: BatchNorm is in"
            " inference mode",
        )
    whole, alone = context.reference64.gradients(
        before,
        images,
        labels,
        [np.arange(len(labels)), shards[shard_id]],
        per_shard_statistics=[own, own],
    )
    if split.syncs_batch_norm:
        if relative_error(actual, alone.statistics[tensor]) <= mismatch.limit:
            yield Diagnosis(
                "unsynced_batch_norm",
                f"{split.name_shard(shard_id)} updates {tensor} with the statistics of its own"
                f" {len(shards[shard_id])} examples, not of all {len(labels)} of the batch",
            )
    elif relative_error(actual, whole.statistics[tensor]) <= mismatch.limit:
        yield WHOLE_BATCH_NORM


def _statistics(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    actual, split = context.read(mismatch, "statistics", 0, mismatch.tensor), context.split
    for shard_id in range(context.trace.num_shards):
        own = context.read(mismatch, "own statistics", shard_id, mismatch.tensor)
        if np.array_equal(actual, own):
            yield Diagnosis(
                "local_batch_norm",
                f"BatchNorm's moving statistics are not averaged: those of"
                f" {split.name_shard(shard_id)} are evaluated and saved, not the mean over every"
                f" {split.shard_noun}",
            )
