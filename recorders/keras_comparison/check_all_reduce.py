"""Checks the sums that each replica receives."""

from collections.abc import Iterator

import numpy as np

from .context import StepContext
from .distances import MARGIN, add, dense, is_within, same_bits
from .findings import Finding
from .sum_explanations import sum_bound, why_sum


def check_all_reduce(context: StepContext) -> Iterator[Finding]:
    """Checks the sums that each replica receives against those of the gradients sent."""
    if not context.has("raw") or len(context.replicas) == 1 or context.overflows:
        return
    context.mark_checked()
    sent, sent_before = context.per_replica(context.kind_sent), context.earlier(context.kind_sent)
    received = context.per_replica("sums") if context.has("sums") else sent
    sums_before = context.earlier("sums")
    clips = context.clips_sum and context.clipping_limits()
    clipped = [context.one.clip(gradients) for gradients in sent] if clips else []
    for r in context.replicas:
        groups: dict[tuple[str, str, tuple[int, ...]], list[int]] = {}
        known: list[np.ndarray] = []
        tensors = list(enumerate(zip(received[r], *sent, strict=True)))
        units = [context.one.units[context.paths.index(p)] for p in context.recording.gradients]
        # A few elements do not determine the factors of the sum; large tensors do.
        for i, (got, *parts) in sorted(tensors, key=lambda item: -np.size(dense(item[1][0]))):
            if is_within(got, add(parts), sum_bound(parts, units[i])):
                continue
            if clipped and is_within(got, add([c[i] for c in clipped]), MARGIN * sum_bound(parts)):
                text = f"{context.clipping_limits()} is applied on each replica, not to the sum"
                groups.setdefault(("clipped_before_the_sum", text, ()), []).append(i)
                continue
            before = []
            if sent_before:
                old = [g[i] for g in sent_before]
                before.append((add(old), sum_bound(old)))
            if sums_before:
                before.append((sums_before[r][i], sum_bound([sums_before[r][i]])))
            is_shared = all(same_bits(other[i], got) for other in received)
            why = why_sum(None if is_shared else r, got, parts, before, known)
            groups.setdefault(why, []).append(i)
        for (cause, text, lost), indices in groups.items():
            yield context.found(
                cause, text, replicas=lost or (r,),
                tensors=tuple(context.recording.gradients[i] for i in sorted(indices)),
            )  # fmt: skip
