"""Checks clipping: the sum of clipped gradients against the clipped sum."""

from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.arithmetic import (
    add_named,
    dense,
    distance,
    factor_of,
    is_far,
    norm,
    ratio,
    relative_norm,
    total_norm,
)
from lockstep.context import Context
from lockstep.hypotheses.of_tensors import why_tensor
from lockstep.trace import Array, Named
from lockstep.verdict import Finding


def check_clipping(context: Context) -> Iterator[Finding]:
    """Checks clipped gradients, and their sum against the clipped sum."""
    source = "sums" if context.clips_sum else "raw"
    if not context.computes or not context.has("clipped") or not context.has(source):
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
