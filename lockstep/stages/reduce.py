"""The node `sum`: what each copy is given is the sum of what the shards send."""

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.answer.verdict import Finding, Measurement
from lockstep.context import Context
from lockstep.explain.rows import Choice, Row
from lockstep.explain.sums import explained_sums
from lockstep.explain.terms import Sums
from lockstep.numeric.arrays import (
    Array,
    Named,
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
    scaled_all,
)
from lockstep.stages.update import rounding_bounds

_CLOSE_SUMS = 1e-5  # Relative; of sums that differ by rounding alone.


def check_sums(sums: Sums, known_names: Sequence[str] = ()) -> Iterator[Finding]:
    """Checks what each copy is given, and explains what is not the right sum.

    Args:
        sums: the sums.
        known_names: weights with a finding already.
    """
    context, found = sums.context, dict[tuple, list[tuple[int, Choice]]]()
    judged: dict[str, tuple[Array, bool, Measurement]] = {}
    for copy, received in enumerate(sums.received):
        wrong = [
            name
            for name in received
            if name not in known_names and not _is_right(sums, copy, name, judged)
        ]
        for choice in _own_with_zeros(sums, wrong):
            row = choice.row
            found.setdefault((row.detail, row.text, row.items), []).append((copy, choice))
            wrong = [name for name in wrong if name not in choice.names]
        missing = [name for name in sums.kinds if name not in received]
        if missing and received:
            text = (
                f"this replica receives no gradient of {len(missing)} weights, and other replicas"
                " do"
            )
            yield context.found(
                "all-reduce", "frozen", text, kind="sums", items=(copy,), tensors=missing
            )
        for choice in explained_sums(sums, copy, wrong) if wrong else ():
            row = choice.row
            found.setdefault((row.detail, row.text, row.items), []).append((copy, choice))
    all_wrong = {n for choices in found.values() for _, choice in choices for n in choice.names}
    for (cause, text, lost), choices in found.items():
        names = dict.fromkeys(name for _, choice in choices for name in choice.names)
        copies = dict.fromkeys(copy for copy, _ in choices)
        apart = [
            ratio(distance(sums.received[copy][name], sums.right(name)), norm(sums.right(name)))
            for copy, choice in choices
            for name in choice.names
        ]
        is_of_all = cause == "not_all_reduced" and len(copies) == len(sums.received)
        reduced = [n for n in sums.common if n not in (*all_wrong, *known_names)]
        if is_of_all and (reduced := [n for n in reduced if _is_sum(sums, n)]):
            cause, text = (
                "partly_all_reduced",
                (
                    f"{len(names)} of {len(sums.kinds)} gradients are not all-reduced, and"
                    f" {len(reduced)} are: each replica applies the gradients of its own examples"
                ),
            )
        yield context.found(
            "all-reduce", cause, text, kind=context.kind_sent if lost else "sums",
            items=lost or copies, tensors=names, distance=max(apart),
        )  # fmt: skip


def _own_with_zeros(sums: Sums, wrong: Sequence[str]) -> Iterator[Choice]:
    """Yields gradients that each copy keeps as it sent them, and that are 0 on some of them.

    On a copy alone, they may be taken for the sum, which has no other part, or for a lost one.
    """
    own = [sums.context.trace.shards_of(copy) for copy in range(len(sums.received))]
    if len(own) != sums.num or any(len(shards) != 1 for shards in own):
        return
    names = []
    for name in wrong:
        sent = [sums.sent[shard][name] for (shard,) in own]
        is_zero = [not np.any(dense(each)) for each in sent]
        if (
            any(is_zero)
            and not all(is_zero)
            and all(
                same_bits(received[name], each)
                for received, each in zip(sums.received, sent, strict=True)
                if name in received
            )
        ):
            names.append(name)
    if names:
        text = f"it is the gradient of the replica's own examples, not that of {sums.senders}"
        yield Choice(Row("not_all_reduced", text, []), tuple(names))


def _is_sum(sums: Sums, name: str) -> bool:
    """Returns whether a gradient that all copies are given is none that a shard sent."""
    got = sums.received[0][name]
    return any(is_far(own[name], got) for own in sums.sent)


def _is_right(
    sums: Sums, copy: int, name: str, judged: dict[str, tuple[Array, bool, Measurement]]
) -> bool:
    """Measures a sum; returns whether it is right.

    Args:
        sums: the sums.
        copy: a copy.
        name: a weight.
        judged: weight → the sum that was judged last, whether it is right, and its measurement;
            updated. Copies that are given equal bits are judged once.
    """
    got = sums.received[copy][name]
    if name in judged and same_bits(got, judged[name][0]):
        _, is_right, measurement = judged[name]
        sums.context.measure_again(measurement, "sums", copy)
        return is_right
    right = sums.right(name)
    is_same = same_bits(got, right)
    parts = [f * dense(own[name]) for f, own in zip(sums.factors, sums.sent, strict=True)]
    allowed = 0.0 if is_same else length(sums.bound(name, parts))
    sums.context.measure("all-reduce", name, "sums", copy, got, right, allowed, same=is_same)
    is_right = is_same or sums.shares({name: got}, sums.of(sums.factors))[name] <= 1
    judged[name] = got, is_right, sums.context.measurements[-1]
    return is_right


# --- A recording alone ---------------------------------------------------------------------------


def check_all_reduce(context: Context) -> Iterator[Finding]:
    """Checks what each copy receives, as the wrapper says that it adds what is sent."""
    if not context.has(context.kind_sent):
        yield from _unlike_sums(context)
        return
    if not (context.has_several or context.has("sums")):
        return
    if context.overflows and not context.oracle.records_overflow:
        return
    sent = context.named(context.kind_sent)
    if not context.has("sums"):
        yield from (_with_own if context.computes else _without_sums)(context, sent)
        return
    if not context.computes and not all(map(are_finite, sent)):
        return
    if not context.computes and not context.trace.about.reduction:
        yield from _unlike_sums(context)
        return
    context.mark_checked("all-reduce")
    own = applied_without_sum(context, sent)
    yield from own_gradients(context, own)
    received = context.named("sums")
    found = [*check_sums(Sums(context, received, [context.share(0)] * len(sent)), own)]
    yield from found
    if not (own or found):
        yield from unequal_sums(context)


def unequal_sums(context: Context) -> Iterator[Finding]:
    """Finds sums that are right on each copy, but differ by rounding."""
    text = (
        "these replicas received sums that differ by rounding from that of replica 0: they add in"
        " different orders, and their weights diverge"
    )
    for name, copies, apart in context.unlike_first("sums"):
        yield context.found(
            "all-reduce", "unequal_sums", text, kind="sums", items=copies, tensors=(name,),
            distance=apart,
        )  # fmt: skip


def own_gradients(context: Context, names: Sequence[str]) -> Iterator[Finding]:
    """Finds gradients that each replica applies as it has sent them."""
    if names:
        num = len(context.named(context.kind_sent)[0])
        text = (
            f"each replica applies its own gradient, not the one it received, for {len(names)} of"
            f" {num} gradients: they changed after the all-reduce"
        )
        yield context.found("all-reduce", "not_all_reduced", text, tensors=names)


def applied_without_sum(context: Context, sent: Sequence[Named]) -> list[str]:
    """Returns the names of gradients that each replica applies as it has sent them."""
    applied = [context.applied(copy) for copy in context.copies]
    if context.computes or not context.clips_sum or len(applied) != len(sent):
        return []
    received = context.named("sums")
    return [
        name
        for name in _of_own_examples(sent, applied)
        if not any(
            name in sums and _is_multiple(got[name], sums[name])
            for got, sums in zip(applied, received, strict=True)
        )
    ]


def _unlike_sums(context: Context) -> Iterator[Finding]:
    """Compares the sums of the replicas, where it is unknown what was sent or how it is summed."""
    if context.computes or not context.has("sums") or len(context.copies) < 2:
        return
    if not all(map(are_finite, context.named("sums"))):
        return
    unlike = list(context.unlike_first("sums"))
    if unlike:
        context.mark_checked("all-reduce")
    far = {name: apart for name, _, apart in unlike if apart > _CLOSE_SUMS}
    if far:
        text = f"the replicas receive different gradients of {len(far)} weights: no common sum"
        yield context.found(
            "all-reduce", "not_all_reduced", text, kind="sums", items=context.copies, tensors=far,
            distance=max(far.values()),
        )  # fmt: skip
    elif unlike:
        yield from unequal_sums(context)


def _without_sums(context: Context, sent: Sequence[Named]) -> Iterator[Finding]:
    """Finds replicas that apply what they sent, if no all-reduce was recorded."""
    applied = [context.applied(copy) for copy in context.copies]
    if len(applied) != len(sent) or not all(applied):
        return
    context.mark_checked("all-reduce")
    if own := _of_own_examples(sent, applied):
        num, reduced = len(sent[0]), _reduced(sent, applied)
        if reduced:
            text = (
                f"{len(own)} of {num} gradients are not all-reduced, and {len(reduced)} are: each"
                " replica applies the gradients of its own examples"
            )
            yield context.found("all-reduce", "partly_all_reduced", text, tensors=own)
            return
        text = (
            "each replica applies the gradient of its own examples: no all-reduce of"
            f" {len(own)} of {num} gradients was seen"
        )
        yield context.found("all-reduce", "not_all_reduced", text, tensors=own)


def _reduced(sent: Sequence[Named], applied: Sequence[Named]) -> list[str]:
    """Returns the names of different gradients that each replica applies as the same one."""
    return [
        name
        for name in sent[0]
        if _are_near(name, applied)
        and not _are_near(name, sent)
        and not all(
            _is_multiple(got[name], own.get(name, 0.0))
            for got, own in zip(applied, sent, strict=True)
        )
    ]


def _of_own_examples(sent: Sequence[Named], applied: Sequence[Named]) -> list[str]:
    """Returns the names of gradients that differ, and that each replica applies as it sent them.

    Gradients of one element alone are not conclusive: any number is a multiple of any other one.
    So is the gradient of a bias of two classes, (a, -a); one that all replicas apply is reduced.
    """
    own = [
        name
        for name in sent[0]
        if not _are_same(name, sent)
        and not _are_same(name, applied)
        and (_are_near(name, sent) or not _are_near(name, applied))
        and all(
            name in got and _is_multiple(got[name], sent[item].get(name, 0.0))
            for item, got in enumerate(applied)
        )
    ]
    return own if any(np.size(dense(sent[0][name])) > 1 for name in own) else []


def _are_same(name: str, copies: Sequence[Named]) -> bool:
    """Returns whether all copies have an array, bitwise equal."""
    first, *others = copies
    return all(name in other and same_bits(first[name], other[name]) for other in others)


def _are_near(name: str, copies: Sequence[Named]) -> bool:
    """Returns whether all copies have an array, equal up to rounding."""
    first, *others = copies
    return all(name in c for c in copies) and not any(is_far(c[name], first[name]) for c in others)


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
        context.mark_checked("all-reduce")
        num = len(sent)
        text = f"the update of each replica uses its own gradient, not the sum over {num} replicas"
        names = [name for name in sent[0] if name in own]
        yield context.found(
            "all-reduce", "not_all_reduced", text, items=context.copies, tensors=names
        )
