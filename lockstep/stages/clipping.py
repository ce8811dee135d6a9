"""The node `clipped`: the optimizer applies what it was given, clipped as in the reference."""

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.answer.verdict import Finding
from lockstep.context import Context
from lockstep.explain.axes import clipped_by_hand, clipped_by_local_norm, reduced_over_parts
from lockstep.explain.factors import meanings
from lockstep.explain.rows import explained_apart
from lockstep.explain.tensors import why_tensor
from lockstep.numeric.arrays import (
    Array,
    Named,
    add_named,
    are_finite,
    dense,
    factor_of,
    farthest,
    is_far,
    norm,
    relative_norm,
    same_bits,
    scaled_all,
    total_norm,
)
from lockstep.reference import StepPair
from lockstep.step import Gradients

_SCALED = 1e-5  # Relative deviation of factors that are equal.
_CLOSE = 1e-3  # The same beside limits, which are short numbers.
_LEAST = 8  # Elements at a limit, or below it.
_OWN = "not_all_reduced", "partly_all_reduced"  # Causes: a replica applies what it has sent.


def check_clipping(context: Context, *, has_own: bool = False) -> Iterator[Finding]:
    """Checks clipped gradients, and their sum against the clipped sum.

    Args:
        context: the step.
        has_own: whether replicas are known to clip gradients of their own.
    """
    if not context.computes:
        yield from summed_after_clipping(context)
    source = "sums" if context.clips_sum else "raw"
    if not context.has("clipped") or not context.has(source):
        return
    if not context.computes:
        context.mark_checked("clipping")
        if not has_own:
            given, clipped = context.named(source), context.named("clipped")
            yield from _factors_of_clipping(context, given, clipped)
        return
    if context.overflows:
        return
    context.mark_checked("clipping")
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
            "clipping", "clipped_before_the_sum",
            f"{oracle.limits() or 'clipping'} is applied on each replica (norms {norms}), not to"
            f" the sum (norm {total_norm(total):.4g}): the sum of the clipped gradients has norm"
            f" {total_norm(sent):.4g}, the clipped sum has {total_norm(expected):.4g}",
            tensors=wrong, distance=relative_norm(sent, expected), allowed=_SCALED,
        )  # fmt: skip


def summed_after_clipping(context: Context) -> Iterator[Finding]:
    """Finds gradients that a script clips on each replica, and then sums itself."""
    if context.has("sums"):
        return
    entering, clipped = (
        [f(copy) for copy in context.copies] for f in (context.entering, context.applied)
    )
    if len(context.copies) < 2 or not all(map(are_finite, (*entering, *clipped))):
        return
    if all(entering) and all(clipped) and _is_without_common_sum(context, entering):
        context.mark_checked("clipping")
        if not _is_without_common_sum(context, clipped):
            norms = ", ".join(f"{total_norm(gradients):.4g}" for gradients in entering)
            text = f"each replica clips its own gradient, of norm {norms}, before the sum"
            yield context.found("clipping", "clipped_before_the_sum", text, items=context.copies)


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
            yield context.found(
                "clipping", "frozen", text, kind="clipped", items=(item,), tensors=sorted(lost)
            )
    factors = []
    for before, after in zip(given, clipped, strict=True):
        names = [name for name in set.intersection(*used) if name in before]
        scale = factor_of([after[n] for n in names], [before[n] for n in names])
        factors.append(1.0 if all(same_bits(after[n], before[n]) for n in names) else scale)
    odd = [item for item, factor in enumerate(factors) if factor != 1]
    triples = zip(factors, given, clipped, strict=True)
    other = [item for item, each in enumerate(triples) if not _is_multiple(*each)]
    if context.clips_sum and 0 < len(other) < len(clipped):
        text = "gradients change between the sum and the update, and not by a common factor"
        yield context.found("clipping", "unexplained", text, kind="clipped", items=other)
    elif context.clips_sum and not np.ptp(factors) <= _SCALED * abs(factors[0]):
        listed = ", ".join(f"{factor:.4g}" for factor in factors)
        text = f"the replicas scale the same gradient by different factors: {listed}"
        cause = "clipped_on_one_replica"
        if _have_equal_parts(context, odd):
            text = f"the ranks scale the same gradient by {listed}: each clips its own parts"
            cause = "clipped_by_local_norm"
        yield context.found("clipping", cause, text, kind="clipped", items=odd)
    elif not context.clips_sum and odd:
        norms = ", ".join(f"{total_norm(gradients):.4g}" for gradients in given)
        text = f"each replica clips its own gradient, of norm {norms}, before the sum"
        yield context.found("clipping", "clipped_before_the_sum", text, kind="raw", items=odd)


def _is_multiple(factor: float, given: Named, clipped: Named) -> bool:
    names = [name for name in clipped if name in given and np.any(dense(clipped[name]))]
    return not any(is_far(clipped[n], factor * dense(given[n]), _CLOSE) for n in names)


def _have_equal_parts(context: Context, ranks: Sequence[int]) -> bool:
    """Returns whether the clipped gradients that each rank holds have the same norm."""
    trace = context.trace
    if not trace.mesh or len(ranks) < 2:
        return False
    norms = [total_norm(trace.local(context.position, "clipped", rank)) for rank in ranks]
    return bool(np.ptp(norms) <= _SCALED * max(norms))


def _is_without_common_sum(context: Context, sums: Sequence[Named]) -> bool:
    """Returns whether the replicas do not clip the same gradient."""
    first, *others = sums
    found = (*context.findings, *context.compared)
    return any(each.detail in _OWN for each in found) or any(
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
            "clipping", "clipped_on_one_replica",
            f"the gradients are clipped to {text} before the sum; the optimizer has {limits}",
            kind="clipped", items=(item,), tensors=wrong, distance=relative_norm(clipped, alone),
        )  # fmt: skip
        return
    num = len(context.shards)
    for row, names, _ in explained_apart(
        wrong, lambda name: why_tensor(clipped[name], alone[name], 0.0, num)
    ):
        yield context.found(
            "clipping", row.detail, f"after clipping, {row.text}", kind="clipped", items=(item,),
            tensors=names, distance=farthest(clipped, alone, names),
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


# --- Against a reference -------------------------------------------------------------------------


def compare_clipping(pair: StepPair) -> Iterator[Finding]:
    """Compares what copies apply, where what they are given is right."""
    step, terms = pair.second, pair.gradients
    if found := [*check_clipping(step)]:
        yield from found
        return
    # What copies apply differently is found where their agreement is checked.
    if far := pair.tolerance.wrong(terms.applied[0], terms.reference_applied):
        cause, text = _why_other(pair, terms.given[0], terms.applied[0])
        yield step.found("clipping", cause, text, distance=max(far.values()))


def _why_other(pair: StepPair, entering: Named, applied: Named) -> tuple[str, str]:
    """Explains applied gradients that differ although what is given is equal."""
    terms, step = pair.gradients, pair.second
    scale = step.trace.loss_scale(step.position, 0)
    calls = step.trace.calls(step.position, 0)
    factors = _factor(applied, entering), _factor(terms.reference_applied, terms.reference)
    limits = [limits_of(each) for each in (step, pair.first)]
    if scale != 1 and limits[0] and "unscale" not in calls[: calls.index(f"clip {limits[0][0]}")]:
        scaled = _clipped(terms, limits[0], scaled_all(entering, scale))
        own = terms.elements(applied)
        if any(_are_near(own, scaled_all(scaled, 1 / by)) for by in (scale, 1)):
            text = f"gradients are clipped ({', '.join(limits[0])}) before unscale_: they are then"
            return "clipped_before_unscale", f"{text} multiplied by the loss scale, {scale:g}"
    if scale != 1 and abs(factors[0] - scale) <= _CLOSE * scale and "unscale" not in calls:
        return "loss_scale_left", f"the update has gradients times the loss scale, {scale:g}"
    if why := clipped_by_hand(pair, is_local=True):
        return why
    if why := _by_parts(step, entering, applied, factors[1]) or clipped_by_local_norm(pair):
        return why
    if why := reduced_over_parts(pair) or _of_previous_step(pair, applied):
        return why
    factor_before = _factor(pair.matching.to_first(step.entering(0)), entering) if calls else 1.0
    if limits[0] == limits[1] and all(factors):
        # Whether the script multiplies them before or after it clips them.
        times, when = factors[0] / factors[1], f"after clipping to {', '.join(limits[0])}"
        if limits[0] and abs(factor_before - 1) > _CLOSE and factor_before:
            times, when = factor_before, "before clipping"
        if not limits[0]:
            when = "after the backward pass"
        known = meanings(pair, times, within=_CLOSE) if calls else []
        known.sort(key=lambda each: each[0] == "micro_batches_not_averaged")  # The loss is right.
        if limits[0] or known:
            text = f"{when}, gradients are multiplied by {times:.6g}"
            cause, reason = next(iter(known), ("scaled_gradient", ""))
            if limits[0] and not known and step.trace.model_axes:
                cause, reason = "other_clipping", "as by the norm of other gradients"
            return cause, f"{text}: {reason}" if reason else text
    texts = [
        f"multiplied by {_shown(own, sent)} (to norm {terms.norm_of(own):.4g})"
        for sent, own in ((terms.reference, terms.reference_applied), (entering, applied))
    ]
    text = f"gradients are {texts[0]} in the first recording and {texts[1]} in the second"
    return "other_clipping", text


def clipped_before_division(pair: StepPair) -> tuple[str, str] | None:
    """Explains gradients that are clipped with a factor that the reference takes out before."""
    terms, by = pair.gradients, pair.gradients.divisor
    limits = [limits_of(each) for each in (pair.second, pair.first)]
    if by == 1 or not limits[0] or limits[0] != limits[1]:
        return None
    if not all(pair.tolerance.fits(given, [(by, terms.reference)]) for given in terms.given):
        return None
    scaled = scaled_all(_clipped(terms, limits[0], scaled_all(terms.reference, by)), 1 / by)
    if not all(_are_near(terms.elements(own), scaled) for own in terms.applied):
        return None
    text = f"gradients are clipped ({', '.join(limits[0])}) before they are divided by {by:.6g}"
    return "clipped_before_unscale", f"{text}, and in the first recording after it"


def clipped_values(pair: StepPair) -> tuple[str, str] | None:
    """Explains gradients of which a script clips the values by hand, by what they were before.

    Elements that both leave below their limits have one factor, and no other one tells more.
    """
    first, second = (
        np.concatenate([dense(own[n]).ravel() for n in pair.gradients.names])
        for own in (pair.gradients.reference, pair.gradients.given[0])
    )
    sizes = np.abs(first), np.abs(second)
    limits = [float(np.max(each, initial=0)) for each in sizes]
    at_limit = [each >= limit * (1 - _SCALED) for each, limit in zip(sizes, limits, strict=True)]
    free = ~(at_limit[0] | at_limit[1])
    times = factor_of([second[free]], [first[free]])
    are_shown = all(np.sum(each) >= _LEAST for each in (*at_limit, free)) and times > 0
    if not are_shown or abs(limits[1] - times * limits[0]) <= _CLOSE * limits[1]:
        return None
    bound = _CLOSE * min(limits[1], times * limits[0])
    value = np.clip(times * first, -limits[1], limits[1])
    # What the reference has clipped was larger.
    is_right = np.abs(second - value) <= bound
    is_larger = at_limit[0] & (second * first > 0) & (sizes[1] >= np.abs(value) - bound)
    if not np.all(is_right | is_larger):
        return None
    if abs(times - 1) <= _CLOSE:
        text = f"values of gradients are clipped to {limits[0]:.4g} in the first recording"
        return "other_clipping", f"{text}, and to {limits[1]:.4g} in the second"
    known = meanings(pair, times, of_sum=True, within=_CLOSE)
    cause, reason = next(iter(known), ("scaled_gradient", "as of a loss that is not divided"))
    text = f"gradients are {times:.6g} times as large before their values are clipped to"
    return cause, f"{text} {limits[1]:.4g}: {reason}"


def _of_previous_step(pair: StepPair, applied: Named) -> tuple[str, str] | None:
    """Explains applied gradients of some weights by those of the previous step."""
    before = pair.second.previous
    wrong = [*pair.tolerance.wrong(applied, pair.gradients.reference_applied)]
    old = pair.matching.to_first(before.entering(0)) if before else {}
    names = [name for name in wrong if name in old]
    factor = factor_of([applied[n] for n in names], [old[n] for n in names])
    is_old = not any(is_far(applied[n], factor * dense(old[n]), _CLOSE) for n in names)
    if len(names) < len(wrong) or not (factor > 0 and is_old):
        return None
    text = f"the gradients of {len(names)} weights that are applied are those of the previous step"
    return "stale_gradient", text


def _clipped(terms: Gradients, limits: list[str], gradients: Named) -> Named:
    """Returns the known elements of gradients after clipping; see `limits_of`."""
    for limit in limits:
        kind, number = limit.split()[0], float(limit.split()[-1])
        if kind == "value":
            gradients = {n: np.clip(dense(g), -number, number) for n, g in gradients.items()}
        else:
            size = terms.norm_of(gradients)
            gradients = scaled_all(gradients, min(1.0, number / size) if size else 1.0)
    return terms.elements(gradients)


def _are_near(actual: Named, expected: Named) -> bool:
    return not any(is_far(actual[name], expected[name], _CLOSE) for name in actual)


def limits_of(step: Context) -> list[str]:
    """Returns how gradients are clipped after the last backward pass; empty if unknown or not."""
    calls = list(step.trace.calls(step.position, 0))
    passes = [i for i, call in enumerate(calls) if call.startswith("backward")]
    last = calls[passes[-1] :] if passes else []
    return [call.removeprefix("clip ") for call in last if call.startswith("clip ")]


def _shown(applied: Named, sent: Named) -> str:
    names = [name for name in applied if name in sent]
    return f"{factor_of([applied[n] for n in names], [sent[n] for n in names]):.6g}"


def _factor(applied: Named, sent: Named) -> float:
    """Returns the factor of all gradients; 0 if they do not have one."""
    names = [name for name in applied if name in sent and norm(sent[name])]
    factor = factor_of([applied[n] for n in names], [sent[n] for n in names])
    is_common = not any(is_far(applied[n], factor * dense(sent[n]), _CLOSE) for n in names)
    return factor if names and is_common else 0.0


def clipped_in_parts(pair: StepPair) -> tuple[str, str] | None:
    """Explains gradients that a script clips by hand, each rank the part that it holds."""
    terms = pair.gradients
    factor, _ = terms.clipping
    by_rows = _by_parts(pair.second, terms.reference, terms.applied[0], factor)
    by_rows = clipped_by_hand(pair, is_local=True) or by_rows
    return by_rows or clipped_by_local_norm(pair) or reduced_over_parts(pair)


def _by_parts(step: Context, sent: Named, applied: Named, usual: float) -> tuple[str, str] | None:
    """Explains sharded gradients of which the replicas multiply their own rows differently."""
    num = step.trace.about.num_replicas
    if num < 2 or step.has("raw"):
        return None
    factors: list[float] = []
    for rank in range(num):
        rows = [(_rows(applied[n], rank, num), _rows(sent[n], rank, num)) for n in applied]
        pairs = [(a, s) for a, s in rows if norm(s)]
        factor = factor_of([a for a, _ in pairs], [s for _, s in pairs])
        if not factor > 0 or any(is_far(a, factor * s, _CLOSE) for a, s in pairs):
            return None
        factors.append(factor)
    if np.ptp(factors) <= _CLOSE * max(factors):
        return None
    listed = ", ".join(f"{factor:.4g}" for factor in factors)
    text = f"the replicas multiply their own rows of the weights by {listed}"
    if any(abs(factor - usual) <= _CLOSE * usual for factor in factors):
        return "clipped_on_one_replica", f"{text}, and the first recording by {usual:.4g}"
    return "clipped_before_the_sum", f"{text}: each clips its part on its own"


def _rows(value: Named, rank: int, num: int) -> np.ndarray:
    """Returns the rows of a weight that `fully_shard` gives to a rank."""
    array = np.atleast_1d(dense(value))
    size = -(-len(array) // num)
    return array[rank * size : (rank + 1) * size]


def other_limits(pair: StepPair) -> Iterator[Finding]:
    """Compares the norms to which gradients are clipped, where the gradients differ."""
    terms, matching = pair.gradients, pair.matching
    if matching.unmatched_first or matching.unmatched_second:
        return  # The norm is that of all weights.
    both = terms.reference_applied, terms.applied[0]
    factors = [_factor(a, g) for a, g in zip(both, (terms.reference, terms.given[0]), strict=True)]
    norms = [total_norm(step.applied(0)) for step in (pair.first, pair.second)]
    if not all(0 < factor < 1 + _CLOSE for factor in factors):
        return
    is_clipped = [factor < 1 - _CLOSE for factor in factors]
    least = min(
        (n for n, clipped in zip(norms, is_clipped, strict=True) if clipped), default=np.inf
    )
    if max(norms) <= (1 + _CLOSE) * least:
        return
    first, second = (
        f"clipped to norm {size:.4g}" if clipped else f"not clipped (norm {size:.4g})"
        for size, clipped in zip(norms, is_clipped, strict=True)
    )
    text = f"gradients are {first} in the first recording and {second} in the second"
    yield pair.second.found("clipping", "other_clipping", text)
