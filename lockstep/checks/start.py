"""Checks the state before a step."""

from collections.abc import Iterator

from lockstep.arithmetic import distance, norm, ratio, same_bits
from lockstep.checks.agreement import differing_copies
from lockstep.context import Context
from lockstep.trace import STATE, STATISTIC, WEIGHT, Named
from lockstep.verdict import Finding


def check_start(context: Context) -> Iterator[Finding]:
    """Checks that copies start from equal weights: those of the previous step, or as defined."""
    if not context.has("before"):
        return
    context.mark_checked()
    before = context.named("before")
    has_previous = context.follows and context.trace.has(context.position - 1, "after")
    if not has_previous or context.trace.about.replayed is not None:
        yield from differing_copies(context, "before", "before the step")
    else:
        after = context.named("after", context.position - 1)
        for name in context.trace.keys:
            changed = [
                copy
                for copy in context.copies
                if name in before[copy]
                and name in after[copy]
                and not same_bits(before[copy][name], after[copy][name])
                and not _is_broadcast(context, name, before[copy], before[0])
            ]
            if changed:
                text = f"{name} changed between two steps"
                yield context.found(
                    "changed_on_its_own", text, kind="before", items=changed, tensors=(name,)
                )
    if context.computes and context.number == 0:
        yield from _initial_state(context)


def _is_broadcast(context: Context, name: str, own: Named, first: Named) -> bool:
    """Returns whether PyTorch's DDP may have sent the statistics of replica 0 to all replicas."""
    of_torch = context.trace.about.framework == "torch"
    return of_torch and context.trace.kinds[name] == STATISTIC and same_bits(own[name], first[name])


def _initial_state(context: Context) -> Iterator[Finding]:
    """Checks the state before the first step, if the oracle defines it."""
    if (expected := context.oracle.start()) is None:
        return
    for shard in context.shards:
        state = context.state(shard)
        wrong = [n for n in expected if n in state and not same_bits(state[n], expected[n])]
        if wrong:
            weights = [n for n in wrong if context.trace.kinds[n] == WEIGHT]
            what = "weights" if weights else "optimizer state or statistics"
            is_state = all(context.trace.kinds[n] == STATE for n in wrong)
            apart = [ratio(distance(state[n], expected[n]), norm(expected[n])) for n in wrong]
            yield context.found(
                "other_initial_state" if is_state else "other_initial_weights",
                f"{len(wrong)} variables start from {what} other than those that model, recipe and"
                " seed define",
                kind="before", items=(context.trace.copy_of(shard),), tensors=wrong,
                distance=max(apart),
            )  # fmt: skip
