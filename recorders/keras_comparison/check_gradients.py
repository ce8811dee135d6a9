"""Checks each replica's gradients, before clipping."""

from collections.abc import Iterator, Sequence

from .check_whole_batch import check_whole_batch
from .context import StepContext
from .distances import MARGIN, add, distance, is_finite, norm, ratio_of
from .expected_gradients import expected_gradients
from .findings import Finding
from .gradient_factors import factors_that_fit, two_factors
from .gradient_hypotheses import gradient_hypotheses
from .recorder_imports import Arrays
from .sums_in_the_step import check_sums_in_the_step, sums_in_the_step
from .tensor_explanations import why_tensor


def check_gradients(context: StepContext) -> Iterator[Finding]:
    """Checks the gradients that each replica computes, and their sum."""
    if not context.has("raw") or context.overflows or context.loss_is_unknown:
        return
    if odd := not_finite_replicas(context):
        yield context.found(
            "not_finite",
            "gradients are NaN or infinite, on one device too: nothing to compare with",
            replicas=odd, design=True,
        )  # fmt: skip
        return
    if sums_in_the_step(context):
        yield from check_sums_in_the_step(context)
        return
    context.mark_checked()
    if not context.has("loss"):
        context.scales = [
            two_factors(context, r, factor) for r, factor in enumerate(factors_that_fit(context))
        ]
    if context.synchronizes:
        yield from check_gradients_together(context)
        return
    for r in context.replicas:
        actual, expected = context.per_replica("raw")[r], expected_gradients(context, r)
        if len(actual) != len(expected):
            yield context.found(
                "frozen",
                f"{len(actual)} weights have a gradient, {len(expected)} on one device",
                replicas=(r,),
            )
            continue
        near = context.near(r, actual, expected, context.times_own(r))
        if wrong := [i for i, is_near in enumerate(near) if not is_near]:
            yield from why_gradients(context, r, actual, expected, wrong)
    if not context.recording.whole_loss:
        yield from check_whole_batch(context)


def not_finite_replicas(context: StepContext) -> tuple[int, ...]:
    """Returns the replicas whose gradients are NaN or infinite, as they are on one device."""
    return tuple(
        r
        for r, (raw, own) in enumerate(zip(context.per_replica("raw"), context.own, strict=True))
        if not is_finite(raw) and not is_finite(own.raw)
    )


def check_gradients_together(context: StepContext) -> Iterator[Finding]:
    """Checks the sum of the sent gradients against the gradient of the whole batch."""
    if context.loss_is_wrong:
        return
    total = [add(gradients) for gradients in zip(*context.per_replica("raw"), strict=True)]
    expected = context.own[0].raw
    near = context.near(0, total, expected)
    if wrong := [i for i, is_near in enumerate(near) if not is_near]:
        yield from scaled_or_reduced(context, 0, total, expected, wrong)


def why_gradients(
    context: StepContext, r: int, actual: Arrays, expected: Arrays, wrong: Sequence[int]
) -> Iterator[Finding]:
    """Explains gradients of a replica, tensor by tensor."""
    left = list(wrong)
    for cause, text, compute in gradient_hypotheses(context, r):
        if not left:
            return
        candidate = compute()
        if len(candidate) != len(actual):
            continue
        near = context.near(r, actual, candidate, context.times_own(r))
        same = context.near(r, expected, candidate, context.times_own(r))
        if explained := [i for i in left if near[i] and not same[i]]:
            yield gradient_finding(
                context, cause, f"the gradients are {text}", r, actual, expected, explained
            )
            left = [i for i in left if i not in explained]
    yield from scaled_or_reduced(context, r, actual, expected, left)


def scaled_or_reduced(
    context: StepContext, r: int, actual: Arrays, expected: Arrays, left: Sequence[int]
) -> Iterator[Finding]:
    """Explains gradients tensor by tensor, and groups those with the same explanation."""
    groups: dict[tuple[str, str], list[int]] = {}
    for i in left:
        limit = MARGIN * max(
            context.spread[r].gradients[i] * abs(context.times_own(r)),
            context.spread[r].backward * norm(expected[i]),
        )
        groups.setdefault(
            why_tensor(actual[i], expected[i], limit, len(context.replicas)), []
        ).append(i)
    for (cause, text), indices in groups.items():
        yield gradient_finding(context, cause, text, r, actual, expected, indices)


def gradient_finding(
    context: StepContext,
    cause: str,
    text: str,
    r: int,
    actual: Arrays,
    expected: Arrays,
    indices: Sequence[int],
) -> Finding:
    """Returns a finding on some gradients of a replica."""
    apart = max(ratio_of(distance(actual[i], expected[i]), norm(expected[i])) for i in indices)
    return context.found(
        cause, text, replicas=(r,), distance=apart,
        tensors=tuple(context.recording.gradients[i] for i in indices),
        allowed=MARGIN * context.spread[r].backward,
    )  # fmt: skip
