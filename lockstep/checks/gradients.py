"""Checks each shard's gradients, before clipping."""

import dataclasses
from collections.abc import Iterator, Sequence

from lockstep.arithmetic import MARGIN, add_named, are_finite, distance, norm, ratio
from lockstep.checks.gradient_scales import scales_that_fit
from lockstep.checks.summed_in_step import check_summed_in_step, is_summed_in_step
from lockstep.checks.whole_batch import check_whole_batch
from lockstep.context import Context, Facts
from lockstep.hypotheses.of_gradients import gradient_hypotheses
from lockstep.hypotheses.of_parts import factor_of_part
from lockstep.hypotheses.of_tensors import why_tensor
from lockstep.trace import Named
from lockstep.verdict import Finding

_NOT_FINITE = "gradients are NaN or infinite, and finite on one device"

_SMALL_PART = 1e-2


def check_gradients(context: Context) -> Iterator[Finding | Facts]:
    """Checks the gradients that each shard computes, and their sum."""
    if not context.has("raw"):
        return
    raw = context.named("raw")
    if not context.computes:
        if odd := [s for s in context.shards if not are_finite(raw[s])]:
            context.mark_checked()
            text = "the gradients are NaN or infinite"
            if not (context.has("loss") and not are_finite(context.arrays("loss")[odd[0]])):
                yield context.found("not_finite", text, items=odd)
        return
    if context.overflows or "loss" in context.facts.unknown:
        return
    facts = context.facts
    if len(facts.exact) == len(context.shards):
        context.mark_checked()
        for shard in context.shards:
            for name, value in raw[shard].items():
                context.measure(name, "raw", shard, value, value, 0.0, same=True)
        return
    if odd := _not_finite(context):
        yield context.found(
            "not_finite",
            "gradients are NaN or infinite, on one device too: nothing to compare with",
            items=odd, design=True,
        )  # fmt: skip
        return
    if is_summed_in_step(context):
        yield from check_summed_in_step(context)
        return
    context.mark_checked()
    if not context.has("loss"):
        yield dataclasses.replace(facts, scales=scales_that_fit(context))
    if context.oracle.synchronizes:
        yield from _check_together(context)
        return
    for shard in context.shards:
        if shard in facts.exact:
            continue
        expected = context.gradients(shard)
        if raw[shard].keys() != expected.keys():
            yield context.found(
                "frozen",
                f"{len(raw[shard])} weights have a gradient, {len(expected)} on one device",
                items=(shard,), tensors=sorted(raw[shard].keys() ^ expected.keys()),
            )  # fmt: skip
            continue
        wrong = []
        for name, value in raw[shard].items():
            limit = context.limit(shard, name, expected[name])
            where = name, "raw", shard
            if not context.measure(*where, value, expected[name], limit, least=_least(expected)):
                wrong.append(name)
        yield from _explain(context, shard, raw[shard], expected, wrong)
    if not context.trace.about.whole_loss:
        yield from check_whole_batch(context)


def _least(gradients: Named) -> float:
    """Returns the size that distances of small gradients are relative to.

    The gradient of a bias before BatchNorm is rounding error only.
    """
    return _SMALL_PART * max(map(norm, gradients.values()), default=0.0)


def _not_finite(context: Context) -> list[int]:
    """Returns the shards whose gradients are NaN or infinite, as they are on one device."""
    raw = context.named("raw")
    return [
        shard
        for shard in context.shards
        if not are_finite(raw[shard]) and not are_finite(context.expected(shard).step.raw)
    ]


def _check_together(context: Context) -> Iterator[Finding]:
    """Checks the sum of the sent gradients against the gradient of the whole batch."""
    if "loss" in context.facts.wrong:
        return
    total, expected = add_named(context.named("raw")), context.expected(0).step.raw
    wrong = []
    for name, value in total.items():
        limit = context.limit(0, name, expected[name])
        where = name, "raw", 0
        if not context.measure(*where, value, expected[name], limit, least=_least(expected)):
            wrong.append(name)
    if wrong:
        yield from _explain_together(context, total, expected, wrong)


def _explain_together(
    context: Context, total: Named, expected: Named, wrong: Sequence[str]
) -> Iterator[Finding]:
    """Explains the sum of the gradients of layers that normalise over all shards."""
    if odd := _odd(total, expected, wrong):
        shards = [s for s in context.shards if not are_finite(context.named("raw")[s])]
        yield context.found("not_finite", _NOT_FINITE, items=shards, tensors=odd)
        return
    alone = add_named([
        context.compute(context.ask(s, scales=scales, starts=None)).raw
        for s, scales in zip(context.shards, _shares(context), strict=True)
    ])  # fmt: skip
    near = context.near(0, total, alone)
    if all(name in near for name in wrong):
        sizes = "/".join(map(str, context.sizes))
        yield context.found(
            "local_statistics",
            f"BatchNorm normalises each shard of {sizes} examples separately; it is to normalise"
            f" over all {sum(context.sizes)} of the batch together",
            items=context.shards, tensors=wrong,
        )  # fmt: skip
        return
    yield from _by_tensor(context, 0, total, expected, wrong, items=context.shards)


def _shares(context: Context) -> list[tuple[float, float]]:
    sizes, num = context.sizes, len(context.shards)
    return [(size / sum(sizes), 1 / num) for size in sizes]


def _explain(
    context: Context, shard: int, actual: Named, expected: Named, wrong: Sequence[str]
) -> Iterator[Finding]:
    """Explains gradients of a shard, tensor by tensor."""
    odd = _odd(actual, expected, wrong)
    if odd:
        yield context.found("not_finite", _NOT_FINITE, items=(shard,), tensors=odd)
    left = [name for name in wrong if name not in odd]
    if not left:
        return
    for cause, text, predict in gradient_hypotheses(context, shard):
        predicted = predict()
        near = context.near(shard, actual, predicted)
        same = context.near(shard, expected, predicted)
        if explained := [name for name in left if name in near and name not in same]:
            yield _finding(
                context, cause, f"the gradients are {text}", shard, actual, expected, explained
            )
            left = [name for name in left if name not in explained]
            if not left:
                return
    yield from _by_tensor(context, shard, actual, expected, left, items=(shard,))


def _by_tensor(
    context: Context, shard: int, actual: Named, expected: Named, left: Sequence[str],
    items: Sequence[int],
) -> Iterator[Finding]:  # fmt: skip
    """Explains gradients tensor by tensor, and groups those with the same explanation."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name in left:
        limit = context.limit(shard, name, expected[name])
        why = why_tensor(actual[name], expected[name], limit, len(context.shards))
        if why[0] == "unexplained":
            why = factor_of_part(context, actual[name], expected[name], limit) or why
        groups.setdefault(why, []).append(name)
    for (cause, text), names in groups.items():
        yield _finding(context, cause, text, shard, actual, expected, names, items)


def _odd(actual: Named, expected: Named, names: Sequence[str]) -> list[str]:
    """Returns the gradients that are not finite although those of one device are."""
    return [n for n in names if not are_finite([actual[n]]) and are_finite([expected[n]])]


def _finding(
    context: Context, cause: str, text: str, shard: int, actual: Named, expected: Named,
    names: Sequence[str], items: Sequence[int] = (),
) -> Finding:  # fmt: skip
    """Returns a finding on some gradients of a shard."""
    apart = max(ratio(distance(actual[n], expected[n]), norm(expected[n])) for n in names)
    return context.found(
        cause, text, items=items or (shard,), tensors=names, distance=apart,
        allowed=MARGIN * context.expected(shard).spread.backward,
    )  # fmt: skip
