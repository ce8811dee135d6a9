"""Why a step differs from the reference: the first hypothesis that a computation confirms.

Most hypotheses predict all arrays of the mismatch, and explain it if the arrays are as predicted,
within rounding, in every tensor; others count what was given, or what was changed.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from app.verification import replica_hypotheses
from app.verification.arithmetic import (
    REDUCED_PRECISIONS,
    Arrays,
    fit,
    is_reduced,
    is_weighted_sum,
    scaling_mistakes,
)
from app.verification.measurement import SMALLEST, UNIT_ROUNDOFF, Measurement, relative_error
from app.verification.step_context import WHOLE_BATCH_NORM, StepContext, name_replicas
from app.verification.trace_checker import state_before, statistics_before
from app.verification.verdict import Diagnosis

UNEXPLAINED = Diagnosis(
    "unexplained",
    "none of these explains it: scaling, a mean of means, a lost or repeated gradient or shard,"
    " another order of examples, BatchNorm's statistics, reduced precision, a scaled update",
)


def explain(context: StepContext, mismatch: Measurement) -> Diagnosis:
    """Returns the first hypothesis that explains `mismatch`, the first one of its trace."""
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
    replicas = range(context.trace.num_shards)
    sizes = [len(context.read(mismatch, "examples", r, "examples")) for r in replicas]
    sent = [context.arrays(mismatch, "gradients", replica_id) for replica_id in replicas]
    got = context.arrays(mismatch, "sums", mismatch.replica_id)
    if len(sent) > 1:
        yield from _lost_or_repeated(got, sent)
    means = [sum(sizes) / (len(sizes) * size) for size in sizes]
    if len(set(sizes)) > 1 and is_weighted_sum(got, sent, means):
        shown = " and ".join(map(str, sorted(set(sizes), reverse=True)))
        yield Diagnosis(
            "mean_of_means",
            "the mean of the replicas' means, not the mean of the batch: shards of"
            f" {shown} examples weigh the same",
        )
    weights = fit(got, sent).tolist()
    factor = float(np.mean(weights))
    if is_weighted_sum(got, sent, [factor] * len(sent)):
        readings = [
            why for factors, why in scaling_mistakes(sizes)
            if all(abs(factor / f - 1) < 1e-6 for f in factors)
        ]  # fmt: skip
        yield Diagnosis(
            "scaled_gradient",
            f"the sum is {factor:.6g} times what it should be"
            + (f": {'; or '.join(readings)}" if readings else ""),
        )
    for name in REDUCED_PRECISIONS:
        if is_reduced(got, sent, name):
            yield Diagnosis(
                "reduced_precision", f"the gradients are exchanged in {name}, not in float32"
            )
    if is_weighted_sum(got, sent, weights):
        terms = " + ".join(f"{w:.4g} × replica {r}" for r, w in enumerate(weights))
        yield Diagnosis("weighted_sum", f"the sum is {terms}")


def _lost_or_repeated(got: Arrays, sent: Sequence[Arrays]) -> Iterator[Diagnosis]:
    replicas = range(len(sent))
    for lost in replicas:
        if is_weighted_sum(got, sent, [float(r != lost) for r in replicas]):
            yield Diagnosis(
                "lost_gradient",
                f"the sum is without replica {lost}: its gradient never got into it",
            )
    for repeated in replicas:
        if is_weighted_sum(got, sent, [1.0 + (r == repeated) for r in replicas]):
            yield Diagnosis(
                "repeated_gradient",
                f"the sum holds the gradient of replica {repeated} twice",
            )


def _update(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    kind, tensor = "slots" if mismatch.kind == "slots" else "weights", mismatch.tensor
    if mismatch.kind == "agreement":
        kind, _, tensor = tensor.partition("/")
    if kind == "sums":
        yield Diagnosis(
            "unequal_sums",
            "replicas got sums that rounding sets apart: they add in different orders, and"
            " their weights part",
        )
    wrong = context.wrong_replicas(mismatch, kind, tensor)
    if len(wrong) < context.trace.num_copies:
        yield _changed_by_itself(context, mismatch, kind, tensor, wrong)
    before = state_before(context.trace, mismatch.step)
    if "iteration" in context.trace.tensors(mismatch.step, "slots"):
        made = context.read(mismatch, "slots", 0, "iteration") - before["iteration"]
        if made != 1:
            yield Diagnosis("scaled_update", f"the optimizer was applied {made} times in one step")
    sums = context.arrays(mismatch, "sums", 0)
    exact = context.reference64.update(before, sums)
    expected = {t: exact[t] - before[t] for t in sums}
    actual = context.arrays(mismatch, "updates", mismatch.replica_id)
    (factor,) = fit(actual, [expected])
    if all(
        np.all(
            np.abs(array - factor * expected[t])
            <= 4 * UNIT_ROUNDOFF * (np.abs(before[t]) + np.abs(array)) + SMALLEST
        )
        for t, array in actual.items()
    ):
        yield Diagnosis(
            "scaled_update",
            f"the update is {factor:.5g} times what the optimizer makes of the sum: another"
            " learning rate, or an update that is applied more than once",
        )


def _changed_by_itself(
    context: StepContext, mismatch: Measurement, kind: str, tensor: str, wrong: list[int]
) -> Diagnosis:
    """Says what distinguishes one replica from those that are right."""
    right = next(r for r in range(context.trace.num_copies) if r not in wrong)
    actual, expected = (
        context.read(mismatch, kind, r, tensor).astype(np.float64).ravel()
        for r in (mismatch.replica_id, right)
    )
    at = int(np.argmax(np.abs(actual - expected)))
    return Diagnosis(
        "changed_by_itself",
        f"replica {mismatch.replica_id} has changed by itself, outside of the update:"
        f" {np.count_nonzero(actual != expected)} of {actual.size} elements of {tensor}, number"
        f" {at} by {actual[at] - expected[at]:.6g}; the sum that it got was right",
    )


def _initial_state(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    wrong = context.wrong_replicas(mismatch, mismatch.kind, mismatch.tensor)
    what = {"weights": "weights", "slots": "optimizer variables"}.get(mismatch.kind, mismatch.kind)
    yield Diagnosis(
        "initial_weights" if mismatch.kind == "weights" else "initial_state",
        f"{name_replicas(wrong, context.num_items(mismatch.kind))} starts from other {what} than"
        f" model, recipe and flags give: {mismatch.tensor}, by up to {mismatch.absolute:.3g}",
    )


def _own_statistics(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    before, images, labels, _ = context.start(mismatch)
    actual = context.read(mismatch, "own statistics", mismatch.replica_id, mismatch.tensor)
    own = statistics_before(context.trace, mismatch.step)[mismatch.replica_id]
    if np.array_equal(actual, own[mismatch.tensor]):
        yield Diagnosis(
            "frozen_batch_norm",
            f"replica {mismatch.replica_id} does not move {mismatch.tensor}: BatchNorm works as in"
            " evaluation",
        )
    (whole,) = context.reference64.gradients(
        before, images, labels, [np.arange(len(labels))], per_shard_statistics=[own]
    )
    if relative_error(actual, whole.statistics[mismatch.tensor]) <= mismatch.limit:
        yield WHOLE_BATCH_NORM


def _statistics(context: StepContext, mismatch: Measurement) -> Iterator[Diagnosis]:
    actual = context.read(mismatch, "statistics", 0, mismatch.tensor)
    for replica_id in range(context.trace.num_shards):
        own = context.read(mismatch, "own statistics", replica_id, mismatch.tensor)
        if np.array_equal(actual, own):
            yield Diagnosis(
                "local_batch_norm",
                "BatchNorm's moving statistics stay local to each replica: what is evaluated"
                f" and saved are replica {replica_id}'s own, not the mean over the replicas",
            )
