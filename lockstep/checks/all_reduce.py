"""Checks clipping, and the sums that each copy receives."""

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.answer.verdict import Finding
from lockstep.arithmetic import (
    add_named,
    are_finite,
    dense,
    distance,
    factor_of,
    farthest,
    is_far,
    is_within,
    norm,
    ratio,
    relative_norm,
    same_bits,
    scaled_all,
    total_norm,
)
from lockstep.checks.update import rounding_bounds
from lockstep.context import Context
from lockstep.hypotheses import explain
from lockstep.hypotheses.of_sums import SumOf, why_sum
from lockstep.hypotheses.of_tensors import why_tensor
from lockstep.trace import Array, Named

_SCALED = 1e-5  # Relative deviation of factors that are equal.
_OWN = "not_all_reduced", "partly_all_reduced"  # Causes: a replica applies what it has sent.


def check_all_reduce(context: Context) -> Iterator[Finding]:
    """Checks the sums that each copy receives against those of the gradients sent."""
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
    context.mark_checked()
    own = _applied_without_sum(context, sent)
    if own:
        text = (
            f"each replica applies its own gradient, not the one it received, for {len(own)} of"
            f" {len(sent[0])} gradients: they changed after the all-reduce"
        )
        yield context.found("not_all_reduced", text, items=context.copies, tensors=own)
    is_right = not own
    for copy in context.copies:
        for finding in _sums_of(context, copy, own):
            is_right = False
            yield finding
    if is_right:
        yield from _unequal_sums(context)


def _applied_without_sum(context: Context, sent: Sequence[Named]) -> list[str]:
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


def _sums_of(context: Context, copy: int, known_names: Sequence[str]) -> Iterator[Finding]:
    """Checks the sums that a copy receives, and groups those with the same explanation.

    A replica without a gradient, of whose examples none uses the weight, sends 0.
    """
    received, known = context.named("sums"), list[np.ndarray]()
    wrong: dict[str, SumOf] = {}
    for name in received[copy]:
        if name not in known_names:
            asked = SumOf(context, copy, name)
            if not asked.is_right():
                wrong[name] = asked
    of_others = dict.fromkeys(name for sums in received for name in sums)
    if missing := [name for name in of_others if name not in received[copy]]:
        text = f"this replica receives no gradient of {len(missing)} weights, and other replicas do"
        yield context.found("frozen", text, kind="sums", items=(copy,), tensors=missing)
    # A few elements do not determine the factors of the sum; large tensors do.
    names = sorted(wrong, key=lambda name: -wrong[name].bound.size)
    for (cause, text, lost), some in explain(names, lambda n: why_sum(wrong[n], known)).items():
        parts = [(distance(wrong[n].got, wrong[n].right), norm(wrong[n].right)) for n in some]
        yield context.found(
            cause, text, kind=context.kind_sent if lost else "sums", items=lost or (copy,),
            tensors=some, distance=max(ratio(*part) for part in parts),
        )  # fmt: skip


def _unequal_sums(context: Context) -> Iterator[Finding]:
    """Finds sums that are right on each copy, but differ by rounding."""
    text = (
        "these replicas received sums that differ by rounding from that of replica 0: they add in"
        " different orders, and their weights diverge"
    )
    for name, copies, apart in context.unlike_first("sums"):
        yield context.found(
            "unequal_sums", text, kind="sums", items=copies, tensors=(name,), distance=apart
        )


def _unlike_sums(context: Context) -> Iterator[Finding]:
    """Compares the sums of the replicas, where it is unknown what was sent or how it is summed."""
    if context.computes or not context.has("sums") or len(context.copies) < 2:
        return
    if not all(map(are_finite, context.named("sums"))):
        return
    unlike = list(context.unlike_first("sums"))
    if unlike:
        context.mark_checked()
    far = {name: apart for name, _, apart in unlike if apart > _SCALED}
    if far:
        text = f"the replicas receive different gradients of {len(far)} weights: no common sum"
        yield context.found(
            "not_all_reduced", text, kind="sums", items=context.copies, tensors=far,
            distance=max(far.values()),
        )  # fmt: skip
    elif unlike:
        yield from _unequal_sums(context)


def _without_sums(context: Context, sent: Sequence[Named]) -> Iterator[Finding]:
    """Finds replicas that apply what they sent, if no all-reduce was recorded."""
    applied = [context.applied(copy) for copy in context.copies]
    if len(applied) != len(sent) or not all(applied):
        return
    context.mark_checked()
    if own := _of_own_examples(sent, applied):
        num, reduced = len(sent[0]), _reduced(sent, applied)
        if reduced:
            text = (
                f"{len(own)} of {num} gradients are not all-reduced, and {len(reduced)} are: each"
                " replica applies the gradients of its own examples"
            )
            yield context.found("partly_all_reduced", text, tensors=own)
            return
        text = (
            "each replica applies the gradient of its own examples: no all-reduce of"
            f" {len(own)} of {num} gradients was seen"
        )
        yield context.found("not_all_reduced", text, tensors=own)


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
        context.mark_checked()
        num = len(sent)
        text = f"the update of each replica uses its own gradient, not the sum over {num} replicas"
        names = [name for name in sent[0] if name in own]
        yield context.found("not_all_reduced", text, items=context.copies, tensors=names)


def check_clipping(context: Context) -> Iterator[Finding]:
    """Checks clipped gradients, and their sum against the clipped sum."""
    if not context.computes and not context.has("sums"):
        yield from _summed_by_hand(context)
    source = "sums" if context.clips_sum else "raw"
    if not context.has("clipped") or not context.has(source):
        return
    if not context.computes:
        context.mark_checked()
        yield from _factors_of_clipping(context, context.named(source), context.named("clipped"))
        return
    if context.overflows:
        return
    context.mark_checked()
    oracle, raw, clipped = context.oracle, context.named(source), context.named("clipped")
    odd = []
    for item, own in enumerate(clipped):
        alone = oracle.clip(raw[item])
        wrong = [name for name in own if is_far(own[name], alone[name])]
        if wrong:
            odd.append(item)
            yield from _why(context, item, raw[item], alone, wrong)
    if not context.has_several or odd or context.clips_sum:
        return
    total, sent = add_named(raw), add_named(clipped)
    expected = oracle.clip(total)
    if wrong := [name for name in sent if is_far(sent[name], expected[name])]:
        norms = ", ".join(f"{total_norm(gradients):.4g}" for gradients in raw)
        yield context.found(
            "clipped_before_the_sum",
            f"{oracle.limits() or 'clipping'} is applied on each replica (norms {norms}), not to"
            f" the sum (norm {total_norm(total):.4g}): the sum of the clipped gradients has norm"
            f" {total_norm(sent):.4g}, the clipped sum has {total_norm(expected):.4g}",
            tensors=wrong, distance=relative_norm(sent, expected), allowed=_SCALED,
        )  # fmt: skip


def _summed_by_hand(context: Context) -> Iterator[Finding]:
    """Finds gradients that a script clips on each replica, and then sums."""
    entering, clipped = (
        [f(copy) for copy in context.copies] for f in (context.entering, context.applied)
    )
    if len(context.copies) < 2 or not all(map(are_finite, (*entering, *clipped))):
        return
    if all(entering) and all(clipped) and _is_without_common_sum(context, entering):
        context.mark_checked()
        if not _is_without_common_sum(context, clipped):
            norms = ", ".join(f"{total_norm(gradients):.4g}" for gradients in entering)
            text = f"each replica clips its own gradient, of norm {norms}, before the sum"
            yield context.found("clipped_before_the_sum", text, items=context.copies)


def _factors_of_clipping(
    context: Context, given: Sequence[Named], clipped: Sequence[Named]
) -> Iterator[Finding]:
    """Compares the factors of clipping, where the limits of the optimizer are unknown."""
    if len(clipped) < 2 or not all(map(are_finite, (*given, *clipped))):
        return
    if context.clips_sum and _is_without_common_sum(context, given):
        return  # Each replica clips another gradient, to another factor.
    used = [{name for name in after if np.any(dense(after[name]))} for after in clipped]
    for item, own in enumerate(used) if context.clips_sum else ():
        if lost := [name for name in set.union(*used) - own if name in given[item]]:
            are = "gradient is" if len(lost) == 1 else "gradients are"
            text = f"after the sum, {len(lost)} {are} 0 on this replica only"
            yield context.found("frozen", text, kind="clipped", items=(item,), tensors=sorted(lost))
    factors = []
    for before, after in zip(given, clipped, strict=True):
        names = [name for name in set.intersection(*used) if name in before]
        scale = factor_of([after[n] for n in names], [before[n] for n in names])
        factors.append(1.0 if all(same_bits(after[n], before[n]) for n in names) else scale)
    odd = [item for item, factor in enumerate(factors) if factor != 1]
    if context.clips_sum and not np.ptp(factors) <= _SCALED * abs(factors[0]):
        listed = ", ".join(f"{factor:.4g}" for factor in factors)
        text = f"the replicas scale the same gradient by different factors: {listed}"
        cause = "clipped_on_one_replica"
        if _have_equal_parts(context, odd):
            text = f"the ranks scale the same gradient by {listed}: each clips its own parts"
            cause = "clipped_by_local_norm"
        yield context.found(cause, text, kind="clipped", items=odd)
    elif not context.clips_sum and odd:
        norms = ", ".join(f"{total_norm(gradients):.4g}" for gradients in given)
        text = f"each replica clips its own gradient, of norm {norms}, before the sum"
        yield context.found("clipped_before_the_sum", text, kind="raw", items=odd)


def _have_equal_parts(context: Context, ranks: Sequence[int]) -> bool:
    """Returns whether the clipped gradients that each rank of a model holds have the same norm."""
    trace = context.trace
    norms = [total_norm(trace.local(context.position, "clipped", rank)) for rank in ranks]
    is_of_model = bool(trace.model_axes) and len(norms) > 1
    return is_of_model and np.ptp(norms) <= _SCALED * max(norms)


def _is_without_common_sum(context: Context, sums: Sequence[Named]) -> bool:
    """Returns whether the replicas do not clip the same gradient."""
    first, *others = sums
    return any(found.detail in _OWN for found in context.findings) or any(
        first.keys() != other.keys() or any(is_far(other[n], first[n]) for n in first)
        for other in others
    )


def _why(
    context: Context, item: int, raw: Named, alone: Named, wrong: Sequence[str]
) -> Iterator[Finding]:
    """Explains gradients that are not the replica's, clipped by the optimizer."""
    clipped = context.named("clipped")[item]
    if text := _threshold([clipped[n] for n in wrong], [raw[n] for n in wrong]):
        limits = context.oracle.limits() or "no clipping"
        yield context.found(
            "clipped_on_one_replica",
            f"the gradients are clipped to {text} before the sum; the optimizer has {limits}",
            kind="clipped", items=(item,), tensors=wrong, distance=relative_norm(clipped, alone),
        )  # fmt: skip
        return
    num = len(context.shards)
    reasons = explain(wrong, lambda name: why_tensor(clipped[name], alone[name], 0.0, num))
    for (cause, text), names in reasons.items():
        yield context.found(
            cause, f"after clipping, {text}", kind="clipped", items=(item,), tensors=names,
            distance=farthest(clipped, alone, names),
        )  # fmt: skip


def _threshold(clipped: Sequence[Array], raw: Sequence[Array]) -> str:
    """Returns the norm or value to which gradients were clipped; "" if they were not."""
    arrays = [(dense(c), dense(r)) for c, r in zip(clipped, raw, strict=True)]
    largest = max(float(np.max(np.abs(c), initial=0)) for c, _ in arrays)
    if largest and all(
        np.allclose(c, np.clip(r, -largest, largest), rtol=_SCALED, atol=0) for c, r in arrays
    ):
        return f"values of {largest:.4g}"
    factors = [factor_of([c], [r]) for c, r in arrays]
    if any(is_far(c, f * r) or not 0 < f < 1 for (c, r), f in zip(arrays, factors, strict=True)):
        return ""
    norms = [norm(c) for c, _ in arrays]
    if len(arrays) > 1 and np.ptp(norms) <= _SCALED * max(norms):
        return f"norm {norms[0]:.4g} each"
    if np.ptp(factors) <= _SCALED * max(factors):
        return f"norm {float(np.linalg.norm(norms)):.4g}"
    return ""
