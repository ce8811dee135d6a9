"""Checks clipping: the sum of clipped gradients against the clipped sum."""

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.arithmetic import (
    add_named,
    are_finite,
    dense,
    distance,
    factor_of,
    is_far,
    norm,
    ratio,
    relative_norm,
    same_bits,
    total_norm,
)
from lockstep.context import Context
from lockstep.hypotheses.of_tensors import why_tensor
from lockstep.trace import Array, Named
from lockstep.verdict import Finding

_SCALED = 1e-5  # Relative deviation of factors that are equal.


def check_clipping(context: Context) -> Iterator[Finding]:
    """Checks clipped gradients, and their sum against the clipped sum."""
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
            tensors=wrong, distance=relative_norm(sent, expected), allowed=1e-5,
        )  # fmt: skip


def _factors_of_clipping(
    context: Context, given: Sequence[Named], clipped: Sequence[Named]
) -> Iterator[Finding]:
    """Compares the factors of clipping, where the limits of the optimizer are unknown."""
    if len(clipped) < 2 or not all(map(are_finite, (*given, *clipped))):
        return
    factors = []
    for before, after in zip(given, clipped, strict=True):
        names = [name for name in after if name in before]
        scale = factor_of([after[n] for n in names], [before[n] for n in names])
        factors.append(1.0 if all(same_bits(after[n], before[n]) for n in names) else scale)
    odd = [item for item, factor in enumerate(factors) if factor != 1]
    if context.clips_sum and not np.ptp(factors) <= _SCALED * abs(factors[0]):
        listed = ", ".join(f"{factor:.4g}" for factor in factors)
        text = f"the replicas scale the same gradient by different factors: {listed}"
        yield context.found("clipped_on_one_replica", text, kind="clipped", items=odd)
    elif not context.clips_sum and odd:
        norms = ", ".join(f"{total_norm(gradients):.4g}" for gradients in given)
        text = f"each replica clips its own gradient, of norm {norms}, before the sum"
        yield context.found("clipped_before_the_sum", text, kind="raw", items=odd)


def _why(
    context: Context, item: int, raw: Named, alone: Named, wrong: Sequence[str]
) -> Iterator[Finding]:
    """Explains gradients that are not the replica's, clipped by the optimizer."""
    clipped = context.named("clipped")[item]
    if text := clipping_threshold([clipped[n] for n in wrong], [raw[n] for n in wrong]):
        limits = context.oracle.limits() or "no clipping"
        yield context.found(
            "clipped_on_one_replica",
            f"the gradients are clipped to {text} before the sum; the optimizer has {limits}",
            kind="clipped", items=(item,), tensors=wrong, distance=relative_norm(clipped, alone),
        )  # fmt: skip
        return
    for name in wrong:
        cause, text = why_tensor(clipped[name], alone[name], 0.0, len(context.shards))
        apart = ratio(distance(clipped[name], alone[name]), norm(alone[name]))
        yield context.found(
            cause, f"after clipping, {text}", kind="clipped", items=(item,), tensors=(name,),
            distance=apart,
        )  # fmt: skip


def clipping_threshold(clipped: Sequence[Array], raw: Sequence[Array]) -> str:
    """Returns the norm or value to which gradients were clipped; "" if they were not."""
    arrays = [(dense(c), dense(r)) for c, r in zip(clipped, raw, strict=True)]
    largest = max(float(np.max(np.abs(c), initial=0)) for c, _ in arrays)
    if largest and all(
        np.allclose(c, np.clip(r, -largest, largest), rtol=1e-5, atol=0) for c, r in arrays
    ):
        return f"values of {largest:.4g}"
    factors = [factor_of([c], [r]) for c, r in arrays]
    if any(is_far(c, f * r) or not 0 < f < 1 for (c, r), f in zip(arrays, factors, strict=True)):
        return ""
    norms = [norm(c) for c, _ in arrays]
    if len(arrays) > 1 and np.ptp(norms) <= 1e-5 * max(norms):
        return f"norm {norms[0]:.4g} each"
    if np.ptp(factors) <= 1e-5 * max(factors):
        return f"norm {float(np.linalg.norm(norms)):.4g}"
    return ""
