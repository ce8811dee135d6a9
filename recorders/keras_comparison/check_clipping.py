"""Checks clipping: the sum of clipped gradients against the clipped sum."""

from collections.abc import Iterator, Sequence

import numpy as np

from .context import StepContext
from .distances import (
    add,
    dense,
    distance,
    factor_of,
    is_far,
    norm,
    ratio_of,
    relative_norm,
    total_norm,
)
from .findings import Finding
from .recorder_imports import Arrays
from .tensor_explanations import why_tensor


def check_clipping(context: StepContext) -> Iterator[Finding]:
    """Checks clipped gradients, and their sum against the clipped sum."""
    if not context.has("clipped") or not context.has("raw") or context.overflows:
        return
    context.mark_checked()
    one, num = context.one, len(context.replicas)
    clips_sum = context.clips_sum
    raw, clipped = (
        context.per_replica("sums" if clips_sum else "raw"),
        context.per_replica("clipped"),
    )
    alone = [one.clip(gradients) for gradients in raw]
    wrong_on = {
        r: [i for i, (c, a) in enumerate(zip(clipped[r], alone[r], strict=True)) if is_far(c, a)]
        for r in context.replicas
    }
    odd = [r for r in context.replicas if wrong_on[r]]
    for r in odd:
        yield from why_clipped(context, r, raw[r], alone[r], wrong_on[r])
    if num == 1 or odd or clips_sum:
        return
    total = [add(g) for g in zip(*raw, strict=True)]
    sent = [add(g) for g in zip(*clipped, strict=True)]
    expected = one.clip(total)
    if wrong := [i for i, (s, e) in enumerate(zip(sent, expected, strict=True)) if is_far(s, e)]:
        norms = ", ".join(f"{total_norm(g):.4g}" for g in raw)
        yield context.found(
            "clipped_before_the_sum",
            f"{context.clipping_limits() or 'clipping'} is applied on each replica (norms {norms}),"
            f" not to the sum (norm {total_norm(total):.4g}): the sum of the clipped gradients has"
            f" norm {total_norm(sent):.4g}, the clipped sum has {total_norm(expected):.4g}",
            tensors=tuple(context.recording.gradients[i] for i in wrong),
            distance=relative_norm(sent, expected), allowed=1e-5,
        )  # fmt: skip


def why_clipped(
    context: StepContext, r: int, raw: Arrays, alone: Arrays, wrong: Sequence[int]
) -> Iterator[Finding]:
    """Explains gradients that are not the replica's, clipped by the optimizer."""
    clipped, num = context.per_replica("clipped")[r], len(context.replicas)
    names = context.recording.gradients
    if text := clipping_threshold([clipped[i] for i in wrong], [raw[i] for i in wrong]):
        expected = context.clipping_limits() or "no clipping"
        yield context.found(
            "clipped_on_one_replica",
            f"the gradients are clipped to {text} before the sum; the optimizer has {expected}",
            replicas=(r,), tensors=tuple(names[i] for i in wrong),
            distance=relative_norm(clipped, alone),
        )  # fmt: skip
        return
    for i in wrong:
        cause, text = why_tensor(clipped[i], alone[i], 0.0, num)
        apart = ratio_of(distance(clipped[i], alone[i]), norm(alone[i]))
        yield context.found(
            cause, f"after clipping, {text}", replicas=(r,), tensors=(names[i],), distance=apart
        )


def clipping_threshold(clipped: Arrays, raw: Arrays) -> str:
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
