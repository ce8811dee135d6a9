"""Checks that all copies have equal weights after the step."""

from collections.abc import Iterator

from lockstep.arithmetic import all_same_bits, distance, norm, ratio, same_bits
from lockstep.context import Context
from lockstep.trace import STATE, WEIGHT
from lockstep.verdict import Finding


def check_agreement(context: Context) -> Iterator[Finding]:
    """Checks that weights and optimizer state are bitwise identical on all copies."""
    if len(context.copies) == 1 or not context.has("after"):
        return
    context.mark_checked()
    # Earlier differences, and differences of the sums, are findings of earlier stages.
    if updates_differ(context):
        return
    known = _unequal(context, "before") if context.has("before") else []
    yield from differing_copies(context, "after", "after the step", but=known)


def updates_differ(context: Context) -> bool:
    """Returns whether different sums, or a wrong update, explain a difference of the copies."""
    applied = [context.applied(copy) for copy in context.copies]
    same = all(all_same_bits(other, applied[0]) for other in applied[1:])
    return "update" in context.facts.wrong or not same


def _unequal(context: Context, kind: str) -> list[str]:
    """Returns the weights and optimizer state that differ between copies."""
    first, *others = context.named(kind)
    return [
        name
        for name in context.of_kind(WEIGHT, STATE)
        if any(name in first and name in o and not same_bits(o[name], first[name]) for o in others)
    ]


def differing_copies(
    context: Context, kind: str, when: str, but: list[str] | tuple[str, ...] = ()
) -> Iterator[Finding]:
    """Yields a finding for each variable that differs from that of replica 0."""
    copies = context.named(kind)
    for name in _unequal(context, kind):
        if name in but:
            continue
        other = [c for c in context.copies if not same_bits(copies[c][name], copies[0][name])]
        apart = max(distance(copies[copy][name], copies[0][name]) for copy in other)
        yield context.found(
            "diverged_replicas",
            f"{when}, these replicas have other values than replica 0",
            kind=kind, items=other, tensors=(name,), distance=ratio(apart, norm(copies[0][name])),
        )  # fmt: skip
