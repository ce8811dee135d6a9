"""Checks the state before a step."""

from collections.abc import Iterator

from .context import StepContext
from .distances import same_bits
from .diverged_replicas import other_bits
from .findings import Finding


def check_start(context: StepContext) -> Iterator[Finding]:
    """Checks that replicas start from equal weights, and from the state after the previous step."""
    context.mark_checked()
    before = context.per_replica("before")
    for index, kind in enumerate(context.kinds):
        if kind in ("weight", "optimizer state") and context.position == 0:
            yield from other_bits(context, before, index, "before the first step")
    if context.follows:
        after = context.per_replica("after", context.position - 1)
        for index, path in enumerate(context.paths):
            changed = [
                r for r in context.replicas if not same_bits(before[r][index], after[r][index])
            ]
            if changed:
                yield context.found(
                    "changed_on_its_own",
                    f"{path} changed between two steps",
                    replicas=tuple(changed), tensors=(path,),
                )  # fmt: skip
