"""Checks the sums that each copy receives."""

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.arithmetic import (
    EPS,
    UNITS,
    add,
    add_named,
    are_finite,
    dense,
    distance,
    factor_of,
    is_far,
    is_within,
    length,
    norm,
    ratio,
    same_bits,
    scaled,
    scaled_all,
    sum_bound,
)
from lockstep.checks.update import rounding_bounds
from lockstep.context import Context
from lockstep.hypotheses.of_sums import SumOf, why_sum
from lockstep.trace import Array, Named
from lockstep.verdict import Finding


def check_all_reduce(context: Context) -> Iterator[Finding]:
    """Checks the sums that each copy receives against those of the gradients sent."""
    if not context.has(context.kind_sent) or not (context.has_several or context.has("sums")):
        return
    if context.overflows and not context.oracle.records_overflow:
        return
    sent = context.named(context.kind_sent)
    if not context.has("sums"):
        yield from (_with_own if context.computes else _without_sums)(context, sent)
        return
    if not context.computes and not (context.trace.about.reduction and all(map(are_finite, sent))):
        return
    context.mark_checked()
    received, sent_before = context.named("sums"), context.earlier(context.kind_sent)
    sums_before = context.earlier("sums")
    limits = context.oracle.limits() if context.computes and context.clips_sum else ""
    clipped = [context.oracle.clip(gradients) for gradients in sent] if limits else []
    share, unit = context.share(0), UNITS.get(context.trace.about.reduced_in, EPS)
    is_right = True
    for item, own in enumerate(received):
        groups: dict[tuple[str, str, tuple[int, ...]], list[str]] = {}
        known: list[np.ndarray] = []
        # A few elements do not determine the factors of the sum; large tensors do.
        for name in sorted(own, key=lambda name: -np.size(dense(own[name]))):
            parts = [gradients[name] for gradients in sent if name in gradients]
            if len(parts) < len(sent):
                continue
            got, total = own[name], scaled(add(parts), share) if share != 1 else add(parts)
            if same_bits(got, total):
                context.measure(name, "sums", item, got, total, 0.0, same=True)
                continue
            width = max(unit, context.oracle.units.get(name, EPS) if context.computes else EPS)
            bound = sum_bound(parts, width) * share
            allowed = length(bound)
            context.measure(name, "sums", item, got, total, allowed)
            if is_within(got, total, bound):
                continue
            if are_finite([got]) and not are_finite(parts):
                text = "gradients overflow, and a finite sum is received: the step is not skipped"
                groups.setdefault(("overflow_not_skipped", text, ()), []).append(name)
                continue
            if not are_finite([got]) and are_finite(parts):
                text = "what is received is NaN or infinite, although what is sent is finite"
                groups.setdefault(("not_finite", text, ()), []).append(name)
                continue
            if clipped and is_within(got, add([c[name] for c in clipped]), 8 * sum_bound(parts)):
                text = f"{limits} is applied on each replica, not to the sum"
                groups.setdefault(("clipped_before_the_sum", text, ()), []).append(name)
                continue
            is_shared = all(same_bits(other[name], got) for other in received if name in other)
            old_parts = [g[name] for g in sent_before or () if name in g]
            old_sum = sums_before[item].get(name) if sums_before else None
            asked = SumOf(
                context, None if is_shared else item, got, parts, share, bound, old_parts, old_sum
            )
            groups.setdefault(why_sum(asked, known), []).append(name)
        is_right = is_right and not groups
        for (cause, text, lost), names in groups.items():
            apart = max(distance(own[n], scaled(add([g[n] for g in sent]), share)) for n in names)
            size = max(norm(add([g[n] for g in sent])) * share for n in names)
            yield context.found(
                cause, text, kind=context.kind_sent if lost else "sums", items=lost or (item,),
                tensors=names, distance=ratio(apart, size),
            )  # fmt: skip
    if is_right:
        yield from _unequal_sums(context, received)


def _unequal_sums(context: Context, received: Sequence[Named]) -> Iterator[Finding]:
    """Finds sums that are right on each copy, but differ by rounding."""
    first = received[0]
    for name in first:
        other = [
            copy
            for copy in context.copies
            if name in received[copy] and not same_bits(received[copy][name], first[name])
        ]
        if other:
            apart = max(distance(received[copy][name], first[name]) for copy in other)
            yield context.found(
                "unequal_sums",
                "these replicas received sums that differ by rounding from that of replica 0: they"
                " add in different orders, and their weights diverge",
                kind="sums", items=other, tensors=(name,),
                distance=ratio(apart, norm(first[name])),
            )  # fmt: skip


def _without_sums(context: Context, sent: Sequence[Named]) -> Iterator[Finding]:
    """Finds replicas that apply what they sent, if no all-reduce was recorded."""
    applied = [context.applied(copy) for copy in context.copies]
    if len(applied) != len(sent) or not all(applied):
        return
    context.mark_checked()
    own = [
        name
        for name in sent[0]
        if not all(name in other and same_bits(sent[0][name], other[name]) for other in sent[1:])
        and all(
            name in got and _is_multiple(got[name], sent[item].get(name, 0.0))
            for item, got in enumerate(applied)
        )
    ]
    if own:
        text = (
            "each replica applies the gradient of its own examples: no all-reduce of"
            f" {len(own)} of {len(sent[0])} gradients was seen"
        )
        yield context.found("not_all_reduced", text, tensors=own)


def _is_multiple(applied: Array, sent: Array) -> bool:
    """Returns whether a gradient is the sent one, clipped or not."""
    factor = factor_of([applied], [sent])
    return not (is_far(applied, factor * dense(sent)) if np.isfinite(factor) else norm(applied))


def _with_own(context: Context, sent: Sequence[Named]) -> Iterator[Finding]:
    """Finds replicas whose update uses what they sent, if no all-reduce was recorded."""
    if not context.has("after") or len(sent) != len(context.copies):
        return
    total, own = scaled_all(add_named(sent), context.share(0)), set(sent[0])
    for before, after, mine in zip(
        context.named("before"), context.named("after"), sent, strict=True
    ):
        bounds = rounding_bounds(context, before, mine)
        alone, right = (context.updated(before, gradients) for gradients in (mine, total))
        own &= {
            n
            for n in mine
            if is_within(after[n], alone[n], bounds[n])
            and not is_within(after[n], right[n], bounds[n])
        }
    if own:
        context.mark_checked()
        num = len(sent)
        text = f"the update of each replica uses its own gradient, not the sum over {num} replicas"
        names = [name for name in sent[0] if name in own]
        yield context.found("not_all_reduced", text, items=context.copies, tensors=names)
