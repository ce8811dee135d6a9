"""Checks that all replicas have equal weights after the step."""

from collections.abc import Iterator

from .context import StepContext
from .distances import same_bits
from .diverged_replicas import other_bits
from .findings import Finding


def check_agreement(context: StepContext) -> Iterator[Finding]:
    """Checks that weights and optimizer state are bitwise identical on all replicas."""
    if len(context.replicas) == 1:
        return
    context.mark_checked()
    after, before = context.per_replica("after"), context.per_replica("before")
    for index, kind in enumerate(context.kinds):
        if kind in ("weight", "optimizer state"):
            # Earlier differences, and differences of the sums, are findings of earlier stages.
            is_known = not all(
                same_bits(before[r][index], before[0][index]) for r in context.replicas
            )
            if not is_known and not updates_differ(context):
                yield from other_bits(context, after, index, "after the step")


def updates_differ(context: StepContext) -> bool:
    """Returns whether different sums, or a wrong update, explain a difference between replicas."""
    sums = [context.sums_of(r) for r in context.replicas]
    same = all(same_bits(a, b) for other in sums[1:] for a, b in zip(other, sums[0], strict=True))
    return context.update_is_wrong or not same
