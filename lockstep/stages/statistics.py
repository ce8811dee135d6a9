"""Checks moving statistics and seeds after the step."""

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.answer.text import first_names
from lockstep.answer.verdict import BY_DESIGN, FAULT, Finding
from lockstep.context import Context
from lockstep.data.trace import SEED, STATISTIC
from lockstep.explain.hypothesis import explain
from lockstep.explain.random_layers import is_random
from lockstep.numeric.arrays import (
    MARGIN,
    TINY,
    Array,
    Named,
    dense,
    farthest,
    fitted,
    is_far,
    is_within,
    length,
    norm,
    same_bits,
    sum_bound,
)


def check_statistics(context: Context) -> Iterator[Finding]:
    """Checks moving statistics and seeds of each shard, and their averages."""
    yield from _other_modes(context)
    yield from _other_dtypes(context)
    names = context.of_kind(STATISTIC, SEED)
    if not names or not context.has("after"):
        return
    if context.computes:
        context.mark_checked()
        for shard in context.shards:
            if shard not in context.exact:
                yield from _of_shard(context, shard, names)
    elif len(context.copies) > 1 and context.of_kind(STATISTIC):
        context.mark_checked()
        yield from _local(context)
    if context.has("own_after"):
        context.mark_checked()
        yield from _averages(context)


def _other_modes(context: Context) -> Iterator[Finding]:
    """Finds layers that only some shards compute in evaluation mode."""
    trace, kinds = context.trace, context.trace.kinds
    modal = [
        str(layer.get("name"))
        for layer in trace.about.layers
        if is_random(layer) or any(kinds.get(n) == STATISTIC for n in layer.get("weights", ()))
    ]
    modes = {shard: trace.in_evaluation(context.position, shard) for shard in context.shards}
    names = [n for n in modal if 0 < sum(n in off for off in modes.values()) < len(modes)]
    if names:
        shards = [shard for shard, off in modes.items() if not off.isdisjoint(names)]
        text = (
            f"{len(names)} layers ({first_names(names)}) are in evaluation mode on these replicas,"
            " and in training mode on others"
        )
        yield context.found("inference_mode", text, stage="forward", items=shards)


def _other_dtypes(context: Context) -> Iterator[Finding]:
    """Finds shards whose layers compute in another dtype than those of the first."""
    first, *others = [context.trace.computed_in(shard) for shard in context.shards]
    odd = [shard for shard, dtype in enumerate(others, start=1) if dtype != first]
    if odd:
        text = f"layers compute in {others[odd[0] - 1]} on these replicas, and in {first} on others"
        yield context.found("reduced_precision", text, stage="forward", items=odd)


def _local(context: Context) -> Iterator[Finding]:
    """Finds moving statistics that differ between copies, where no oracle computes them."""
    layers = {name: x for x in context.trace.about.layers for name in x.get("weights", ())}
    kinds = ("before", "after") if context.trace.mesh and context.has("before") else ()
    states = [*zip(*map(context.named, kinds), strict=True)]
    for name, copies, apart in context.unlike_first("after"):
        own = [(b[name], a[name]) for b, a in states if name in b and name in a]
        is_constant = bool(own) and all(same_bits(before, after) for before, after in own)
        if context.trace.kinds[name] != STATISTIC or is_constant:  # Such as a rank's positions.
            continue
        if not is_of_norm(layers.get(name)):
            continue  # The claim compares it with the reference; nothing makes it local by design.
        text = (
            "each replica normalises its own examples and has moving statistics that differ from"
            " those of replica 0"
        )
        layer, status = layers.get(name, {}), BY_DESIGN
        if "Sync" in str(layer.get("class")) or layer.get("synchronized"):
            if not _are_of_groups([each[name] for each in context.named("after")]):
                status = FAULT
            text = (
                f"{layer.get('name')} is synchronised, but its moving statistics differ from those"
                " of replica 0"
            )
        yield context.found(
            "local_statistics", text, status=status, kind="after", items=copies, tensors=(name,),
            distance=apart,
        )  # fmt: skip


def is_of_norm(layer: Mapping[str, Any] | None) -> bool:
    """Returns whether a layer normalises the examples of a batch, or is unknown."""
    return layer is None or "norm" in str(layer.get("class")).lower()


def _are_of_groups(values: Sequence[Array]) -> bool:
    """Returns whether each copy shares its value with another one."""
    return all(sum(same_bits(value, other) for other in values) > 1 for value in values)


def _of_shard(context: Context, shard: int, names: Sequence[str]) -> Iterator[Finding]:
    """Checks the statistics and seeds that a shard leaves."""
    left, before = context.left(shard), context.state(shard)
    own = _own(context, shard)
    expected = context.expected(shard)
    allowed = MARGIN * expected.forward
    wrong = []
    for name in names:
        if name not in left or name not in own:
            continue
        same = same_bits(left[name], own[name])
        limit = 0.0
        if context.trace.kinds[name] != SEED:
            far = MARGIN * expected.statistics.get(name, 0.0)
            limit = max(far, allowed * norm(own[name])) + TINY
        if not context.measure(name, "own_after", shard, left[name], own[name], limit, same=same):
            wrong.append(name)
    if not wrong:
        return
    stay = all(same_bits(left[name], before[name]) for name in wrong)
    if stay and context.actual[shard].off:
        return
    apart = farthest(left, own, wrong)
    where: Any = {"items": (shard,), "tensors": wrong, "distance": apart, "allowed": allowed}
    if stay:
        text = "moving statistics and seeds do not change in the training step"
        yield context.found("inference_mode", text, **where)
        return
    cause, text = _why(context, shard, left, before, own, wrong)
    if any(finding.detail == "random_layers" for finding in context.findings):
        return
    if context.oracle.synchronized_layers and cause == "unexplained":
        cause = "local_statistics"
        text = (
            "the layer is synchronized, but its moving statistics are those of one replica's"
            " examples, not of the whole batch"
        )
    yield context.found(cause, text, **where)


def _own(context: Context, shard: int) -> Named:
    """Returns the variables that a shard should leave, given the state that it computes with."""
    ask, right = context.actual[shard], context.right[shard]
    if ask.state is right.state and ask.data is right.data:
        return context.expected(shard).step.after
    state = ask.state | context.seeds(shard)
    return context.oracle.compute(ask._replace(state=state, off=())).after


def _why(
    context: Context, shard: int, left: Named, before: Named, own: Named, wrong: Sequence[str]
) -> tuple[str, str]:
    """Explains statistics by known ways to average wrongly."""
    allowed = MARGIN * context.expected(shard).forward

    def fits(predicted: Named) -> bool:
        return all(n in predicted and not is_far(left[n], predicted[n], allowed) for n in wrong)

    change = {n: dense(own[n]) - dense(before[n]) for n in wrong}
    again = context.oracle.compute(context.ask(shard, state=context.state(shard) | own)).after
    if fits(again) or fits({n: dense(own[n]) + change[n] for n in wrong}):
        return "doubled_average", "moving statistics change twice as much as they should"
    if context.oracle.layers_with_statistics and len(context.shards) > 1:
        whole = context.oracle.compute(context.ask(shard, data=context.whole, starts=None))
        if fits(whole.after):
            return "whole_batch_norm", "BatchNorm normalises over the whole batch, not each shard"
    for other in context.shards:
        if other != shard and fits(_own(context, other)):
            name = context.trace.name_of("own_after", other)
            return "same_examples", f"moving statistics are those of {name}"
    num = context.sizes[shard]
    if num > 1:
        for factor, what in ((num / (num - 1), "n / (n - 1)"), ((num - 1) / num, "(n - 1) / n")):
            if fits({n: dense(before[n]) + factor * change[n] for n in wrong}):
                return "wrong_count", f"moving statistics are those of a count that is {what} off"
    return (
        "unexplained",
        "moving statistics or seeds differ from those of one device for the replica's examples",
    )


def _averages(context: Context) -> Iterator[Finding]:
    """Checks the statistics that are evaluated and saved: the mean over the shards."""
    own, saved = context.named("own_after"), context.named("after")[0]
    wrong: list[str] = []
    for name in context.of_kind(STATISTIC):
        if not all(name in each for each in (*own, saved)):
            continue
        mean, bound = _average(own, name, [1 / len(own)] * len(own))
        same = same_bits(saved[name], np.mean([each[name] for each in own], axis=0))
        context.measure(name, "after", 0, saved[name], mean, length(bound), same=same)
        if not same and not is_within(saved[name], mean, bound):
            wrong.append(name)
    why = functools.partial(_why_average, context, own, saved, wrong)
    for (cause, text), names in explain(wrong, why).items():
        yield context.found(cause, text, kind="after", tensors=names)


def _average(
    own: Sequence[Named], name: str, weights: Sequence[float]
) -> tuple[np.ndarray, np.ndarray]:
    """Returns a weighted sum of the shards' statistics, and the bound of its error."""
    parts = [weight * dense(each[name]) for weight, each in zip(weights, own, strict=True)]
    return np.sum(parts, axis=0), sum_bound(parts)


def _why_average(
    context: Context, own: Sequence[Named], saved: Named, wrong: Sequence[str], name: str
) -> tuple[str, str]:
    """Explains moving statistics that are not the mean over the shards."""
    num = len(own)
    for shard in range(num):
        if is_within(saved[name], *_average(own, name, np.eye(num)[shard].tolist())):
            shown = context.trace.name_of("own_after", shard)
            return "statistics_not_averaged", (
                f"BatchNorm's moving statistics are not averaged: those of {shown} are evaluated"
                " and saved"
            )
    columns = [np.concatenate([dense(each[n]).ravel() for n in wrong]) for each in own]
    target = np.concatenate([dense(saved[n]).ravel() for n in wrong])
    # Each equation in units of its rounding error: means are small beside variances.
    unit = np.concatenate([_average(own, n, [1 / num] * num)[1].ravel() for n in wrong])
    system = np.stack(columns, axis=1) / unit[:, None]
    factors = fitted(system, target / unit).tolist()
    sizes = context.sizes if context.has("data") else [1] * num
    known = {
        "weighted_average": [size / sum(sizes) for size in sizes],
        "doubled_average": [1.0] * num,
    }
    for cause, weights in known.items():
        if is_within(saved[name], *_average(own, name, weights)):
            how = "summed, not averaged"
            if cause == "weighted_average":
                how = "averaged with weights, by the size of the shards"
            return cause, f"moving statistics are {how}"
    # Statistics of shards are alike: their weights are known to a few digits.
    mean, bound = _average(own, name, factors)
    if len(target) > 2 * num and is_within(saved[name], mean, MARGIN * bound):
        shown = ", ".join(f"{weight:.3g}" for weight in factors)
        return "weighted_average", f"moving statistics are averaged with the weights {shown}"
    return "unexplained", "moving statistics are not the mean over the replicas"
