"""Why a step is false: hypotheses that are tested by computation, and the first that holds.

Most say what all false arrays would be if they were true, and explain the numbers if the arrays are
that, within rounding, in every tensor; others count what was given, or what was changed.
"""

from collections.abc import Iterator

import numpy as np

from app.verification import replica_hypotheses
from app.verification.arithmetic import (
    REDUCED_PRECISIONS,
    fit,
    is_reduced,
    is_weighted_sum,
    telling_factors,
)
from app.verification.measurement import SMALLEST, UNIT_ROUNDOFF, Measurement, relative_error
from app.verification.step_context import WHOLE_BATCH_NORM, StepContext, name_replicas
from app.verification.trace_checker import state_before
from app.verification.verdict import Diagnosis

UNEXPLAINED = Diagnosis(
    "unexplained",
    "none of these explains it: scaling, a mean of means, a lost or repeated gradient or shard,"
    " another order of examples, BatchNorm's statistics, reduced precision, a scaled update",
)


def explain(context: StepContext, false: Measurement) -> Diagnosis:
    """Returns the first hypothesis that explains why `false`, the first one, is false."""
    tests = {
        "examples": replica_hypotheses.examples,
        "loss": replica_hypotheses.loss,
        "gradients": replica_hypotheses.gradients,
        "sums": _sums,
        "own statistics": _own_statistics,
        "statistics": _statistics,
    }
    test = tests.get(false.kind, _update) if false.step else _initial_state
    return next(test(context, false), UNEXPLAINED)


def _sums(context: StepContext, false: Measurement) -> Iterator[Diagnosis]:
    replicas = range(context.trace.num_replicas)
    sizes = [len(context.read(false, "examples", r, "examples")) for r in replicas]
    sent = [context.arrays(false, "gradients", replica_id) for replica_id in replicas]
    got = context.arrays(false, "sums", false.replica_id)
    if len(sent) > 1:
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
    means = [sum(sizes) / (len(sizes) * size) for size in sizes]
    if len(set(sizes)) > 1 and is_weighted_sum(got, sent, means):
        shown = " and ".join(map(str, sorted(set(sizes), reverse=True)))
        yield Diagnosis(
            "mean_of_means",
            "the mean of the replicas' means, not the mean of the batch: shards of"
            f" {shown} examples weigh the same",
        )
    weights = fit(got, sent)
    factor = float(np.mean(weights))
    if is_weighted_sum(got, sent, [factor] * len(sent)):
        readings = [
            why for factors, why in telling_factors(sizes)
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


def _update(context: StepContext, false: Measurement) -> Iterator[Diagnosis]:
    kind, tensor = "slots" if false.kind == "slots" else "weights", false.tensor
    if false.kind == "agreement":
        kind, _, tensor = tensor.partition("/")
    if kind == "sums":
        yield Diagnosis(
            "unequal_sums",
            "replicas got sums that rounding sets apart: they add in different orders, and"
            " their weights part",
        )
    wrong = context.wrong_replicas(false, kind, tensor)
    if len(wrong) < context.trace.num_replicas:
        yield _changed_by_itself(context, false, kind, tensor, wrong)
    before = state_before(context.trace, false.step)
    if "iteration" in context.trace.tensors(false.step, "slots"):
        made = context.read(false, "slots", 0, "iteration") - before["iteration"]
        if made != 1:
            yield Diagnosis("scaled_update", f"the optimizer was applied {made} times in one step")
    sums = context.arrays(false, "sums", 0)
    exact = context.reference64.update(before, sums)
    expected = {t: exact[t] - before[t] for t in sums}
    held = context.arrays(false, "updates", false.replica_id)
    (factor,) = fit(held, [expected])
    if all(
        np.all(
            np.abs(array - factor * expected[t])
            <= 4 * UNIT_ROUNDOFF * (np.abs(before[t]) + np.abs(array)) + SMALLEST
        )
        for t, array in held.items()
    ):
        yield Diagnosis(
            "scaled_update",
            f"the update is {factor:.5g} times what the optimizer makes of the sum: another"
            " learning rate, or an update that is applied more than once",
        )


def _changed_by_itself(context: StepContext, false: Measurement, kind, tensor, wrong) -> Diagnosis:
    """Says what distinguishes one replica from those that are right."""
    right = next(r for r in range(context.trace.num_replicas) if r not in wrong)
    held, expected = (
        context.read(false, kind, r, tensor).astype(np.float64).ravel()
        for r in (false.replica_id, right)
    )
    at = int(np.argmax(np.abs(held - expected)))
    return Diagnosis(
        "changed_by_itself",
        f"replica {false.replica_id} has changed by itself, outside of the update:"
        f" {np.count_nonzero(held != expected)} of {held.size} elements of {tensor}, number"
        f" {at} by {held[at] - expected[at]:.6g}; the sum that it got was right",
    )


def _initial_state(context: StepContext, false: Measurement) -> Iterator[Diagnosis]:
    wrong = context.wrong_replicas(false, false.kind, false.tensor)
    what = {"weights": "weights", "slots": "optimizer variables"}.get(false.kind, false.kind)
    yield Diagnosis(
        "initial_weights" if false.kind == "weights" else "initial_state",
        f"{name_replicas(wrong, context.trace.num_replicas)} starts from other {what} than"
        f" model, recipe and flags give: {false.tensor}, by up to {false.absolute:.3g}",
    )


def _own_statistics(context: StepContext, false: Measurement) -> Iterator[Diagnosis]:
    before, images, labels, _ = context.start(false)
    held = context.read(false, "own statistics", false.replica_id, false.tensor)
    if np.array_equal(held, before[false.tensor]):
        yield Diagnosis(
            "frozen_batch_norm",
            f"replica {false.replica_id} does not move {false.tensor}: BatchNorm works as in"
            " evaluation",
        )
    (whole,) = context.reference64.gradients(before, images, labels, [np.arange(len(labels))])
    if relative_error(held, whole.statistics[false.tensor]) <= false.limit:
        yield WHOLE_BATCH_NORM


def _statistics(context: StepContext, false: Measurement) -> Iterator[Diagnosis]:
    held = context.read(false, "statistics", 0, false.tensor)
    for replica_id in range(context.trace.num_replicas):
        own = context.read(false, "own statistics", replica_id, false.tensor)
        if np.array_equal(held, own):
            yield Diagnosis(
                "local_batch_norm",
                "BatchNorm's moving statistics stay local to each replica: what is evaluated"
                f" and saved are replica {replica_id}'s own, not the mean over the replicas",
            )
