"""Checks each shard's gradients, before clipping, and their sum against the whole batch."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.answer.verdict import BY_DESIGN, NOT_COMPARED, NOTHING, Finding
from lockstep.context import Actual, Context
from lockstep.explain.oracle_rows import rows_of_shard, rows_of_synchronized, rows_of_whole
from lockstep.explain.rows import Row, choose, explained_apart
from lockstep.explain.solve import solve
from lockstep.explain.tensors import factor_of_part, why_tensor
from lockstep.numeric.arrays import (
    EPS,
    MARGIN,
    NOTHING_BUT_ROUNDING,
    SMALL_PART,
    Named,
    add_named,
    all_same_bits,
    are_finite,
    dense,
    distance,
    factor_of,
    farthest,
    norm,
    relative_norm,
)
from lockstep.oracles.rounding import OracleBound
from lockstep.stages.forward import DRAWS_OUTSIDE
from lockstep.stages.update import is_skipped

_CLOSE = 1e-4  # Relative; of solved factors.


def check_gradients(context: Context) -> Iterator[Finding | Actual]:
    """Checks the gradients that each shard computes, and their sum."""
    if not context.has("raw"):
        return
    raw = context.named("raw")
    odd = [shard for shard in context.shards if not are_finite(raw[shard])]
    if not context.computes:
        if odd:
            context.mark_checked("gradients")
        if odd and not context.is_wrong("loss") and not is_skipped(context):
            yield context.found(
                "gradients", "not_finite", "the gradients are NaN or infinite", items=odd
            )
        return
    if context.overflows or any(found.detail == "other_loss" for found in context.findings):
        return
    if len(context.exact) == len(context.shards):
        context.mark_checked("gradients")
        for shard in context.shards:
            for name, value in raw[shard].items():
                context.measure("gradients", name, "raw", shard, value, value, 0.0, same=True)
        return
    if odd := [shard for shard in odd if not are_finite(context.expected(shard).step.raw)]:
        text = "gradients are NaN or infinite, on one device too: nothing to compare with"
        yield context.found("gradients", "not_finite", text, items=odd, status=NOTHING)
        return
    if (found := _check_sums(context)) is not None:
        yield from found
        return
    context.mark_checked("gradients")
    if not context.has("loss"):
        fits = [Actual(s, {"scales": each}) for s, each in enumerate(_scales_that_fit(context))]
        yield from fits
        context = context.knowing(fits)
    if context.oracle.synchronized_layers:
        yield from _check_together(context)
        return
    for shard in context.shards:
        if shard not in context.exact:
            yield from _check_shard(context, shard)
    yield from _check_whole_batch(context)


def _check_shard(context: Context, shard: int) -> Iterator[Finding]:
    """Checks the gradients of a shard, and explains them by what it may have computed."""
    actual, expected = context.named("raw")[shard], context.gradients(shard)
    if actual.keys() != expected.keys():
        yield _other_weights(context, actual, expected, (shard,))
        return
    rows, bound = rows_of_shard(context, shard), context.bound([shard])
    is_right = len(bound.near(actual, [(1.0, expected)])) == len(actual)
    if not is_right and _may_widen(context):
        bound = context.widen(shard)
    yield from _compare(context, actual, expected, (shard,), rows, bound)


def _other_weights(
    context: Context, actual: Named, expected: Named, items: Sequence[int]
) -> Finding:
    return context.found(
        "gradients", "frozen",
        f"{len(actual)} weights have a gradient, {len(expected)} on one device",
        items=items, tensors=sorted(actual.keys() ^ expected.keys()),
    )  # fmt: skip


def _may_widen(context: Context) -> bool:
    """Returns whether units may turn over: eight units of 16 bits would excuse a fault."""
    return context.oracle.unit <= EPS and not context.is_wrong("forward", "loss")


def _check_together(context: Context) -> Iterator[Finding]:
    """Checks the sum of the gradients of layers that normalise over all shards."""
    if context.is_wrong("loss") or any(f.detail == "random_layers" for f in context.findings):
        return
    if not context.has("y_pred") and context.draws_outside:
        yield context.found("gradients", "random_layers", DRAWS_OUTSIDE, status=NOT_COMPARED)
        return
    total, right = add_named(context.named("raw")), context.expected(0).step.raw
    if total.keys() != right.keys():
        yield _other_weights(context, total, right, context.shards)
        return
    for expected in context.expected_together(may_widen=_may_widen(context)):
        bound, right = context.bound([0], steps=[expected]), expected.step.raw
        if len(bound.near(total, [(1.0, right)])) == len(total):
            break
    yield from _compare(context, total, right, context.shards, rows_of_synchronized(context), bound)


def _compare(
    context: Context, actual: Named, expected: Named, items: Sequence[int], rows: Iterable[Row],
    bound: OracleBound,
) -> Iterator[Finding]:  # fmt: skip
    """Compares gradients, and explains the wrong ones.

    Args:
        context: the step.
        actual, expected: the gradients.
        items: the shards that have sent them.
        rows: what these shards may have computed.
        bound: how far rounding can move the gradients.
    """
    least, right = SMALL_PART * max(map(norm, expected.values()), default=0.0), [(1.0, expected)]
    limits = {name: bound.of_ties(right, name).far for name in expected}
    wrong = []
    for name, share in bound.shares(actual, right).items():
        apart = distance(actual[name], expected[name])
        limit = apart / share if 0 < share < np.inf else limits[name]
        where = "gradients", name, "raw", items[0], actual[name], expected[name], limit
        if not context.measure(*where, least=least) or not share <= 1:
            wrong.append(name)
    odd = [n for n in wrong if not are_finite([actual[n]]) and are_finite([expected[n]])]
    if odd:
        senders = [s for s in items if not are_finite(context.named("raw")[s])]
        text = "gradients are NaN or infinite, and finite on one device"
        yield context.found("gradients", "not_finite", text, items=senders, tensors=odd)
    left = [name for name in wrong if name not in odd]

    def why(name: str) -> tuple[str, str]:
        asked = actual[name], expected[name], limits[name]
        return why_tensor(*asked, len(context.shards), factor_of_part(context, *asked))

    chosen, left = choose(actual, left, rows, bound, right=expected)
    for row, names, _ in [*chosen, *explained_apart(left, why)]:
        yield context.found(
            "gradients", row.detail, row.text, items=items, tensors=names,
            distance=farthest(actual, expected, names),
            allowed=MARGIN * max(step.backward for step in bound.steps),
        )  # fmt: skip


# Steps that show no loss, or sum gradients themselves.


def _scales_that_fit(context: Context) -> list[tuple[float, ...]]:
    """Returns the factors of each shard's data loss and regularisation, where no loss is recorded.

    The sum over the shards shows whether they are right. A shard whose factors explain none of its
    gradients gets the median of those that do.
    """
    fits = [_factors_of(context, shard) for shard in context.shards]
    known = [fit for fit in fits if fit] or [(1 / len(fits), 1 / len(fits))]
    usual: tuple[float, ...] = tuple(np.median(known, axis=0).tolist())
    return [fit or usual for fit in fits]


def _factors_of(context: Context, shard: int) -> tuple[float, ...] | None:
    """Returns two factors that explain most gradients of a shard; None if none explains any.

    A step may divide the data loss by the global batch, and regularisation by the number of
    replicas. Each gradient gives factors, because some may be wrong; the best ones are fitted again
    to all gradients that they explain.
    """
    actual, own = context.named("raw")[shard], context.expected(shard).step.raw
    if actual.keys() != own.keys() or not are_finite(actual) or not are_finite(own):
        return None
    ask = context.right[shard]
    regular = context.oracle.regular_gradients(ask.state, ask.data)
    both = {n: dense(regular.get(n, np.zeros(np.shape(dense(own[n]))))) for n in own}
    rest = {name: dense(own[name]) - both[name] for name in own}

    def rows(names: Sequence[str]) -> Iterator[Row]:
        for terms in ([own], [rest, both]):
            solved, is_known = solve(actual, terms, names)
            if is_known.all() and np.isfinite(solved).all():
                a, b = map(float, (solved[0], solved[-1]))
                yield Row("", "", [(a, rest), (b, both)], factors=(a, b))

    sizes = {name: norm(value) for name, value in own.items()}
    large = [n for n in own if sizes[n] > NOTHING_BUT_ROUNDING * np.mean([*sizes.values()])]
    bound = context.bound([shard], 1.0)
    chosen, _ = choose(actual, [*own], (row for name in large for row in rows([name])), bound)
    if chosen:
        again, _ = choose(actual, chosen[0].names, rows(chosen[0].names), bound)
    return (again or chosen)[0].row.factors if chosen else None


def _check_sums(context: Context) -> list[Finding] | None:
    """Checks gradients of a custom step that adds those of the shards itself.

    Returns None unless each shard sends the same sum, and it is a multiple of the gradient of the
    whole batch.
    """
    raw, asks = context.named("raw"), context.actual
    if len(raw) == 1 or context.oracle.synchronized_layers or any(ask.off for ask in asks):
        return None
    terms = [context.expected(shard).step.raw for shard in context.shards]
    is_same = all(all_same_bits(other, raw[0]) for other in raw[1:])
    if not is_same or any(own.keys() != raw[0].keys() for own in terms):
        return None
    factors, is_known = solve(raw[0], terms)
    is_sum = np.count_nonzero(np.abs(factors) > _CLOSE * np.max(np.abs(factors))) > 1
    if not (is_known.all() and is_sum):
        return None
    if context.modal_layers or context.is_wrong("loss"):
        return []
    expected = context.expected_of(context.ask(0, data=context.used, scales=(1.0, 1.0)))
    total, whole, bound = add_named(raw), expected.step.raw, OracleBound([expected])
    factor = factor_of([*total.values()], [whole[name] for name in total])
    if len(bound.near(total, [(factor, whole)])) < len(whole):
        return None
    context.mark_checked("gradients")
    right = bound.near(total, [(1.0, whole)])
    if not (names := [name for name in whole if name not in right]):
        return []
    text = (
        "the train_step sums the gradients over the replicas; the sum of what they then send adds"
        f" up to {factor:.4g} times the gradient of the whole batch"
    )
    far = relative_norm(total, whole)
    return [context.found("gradients", "scaled_gradient", text, tensors=names, distance=far)]


# The gradient of the whole batch.


def _check_whole_batch(context: Context) -> Iterator[Finding]:
    """Compares the sum over the shards with the gradient of the whole batch."""
    if len(context.shards) == 1 or context.is_wrong("loss", "forward"):
        return
    if not context.oracle.may_mix and context.has("loss"):
        return  # The loss is a sum over examples, and each shard's part of it is right.
    state, off = context.state(0), context.modal_layers
    of_regular = sum(ask.scales[1] for ask in context.actual) if context.has("loss") else 1.0
    ask = context.ask(
        0, state=state, data=context.used, scales=(1.0, of_regular), starts=None, off=off
    )
    shards = [context.gradients(s, state=state, off=off) for s in context.shards]
    whole = context.compute(ask).raw
    if any(shard.keys() != whole.keys() for shard in shards):  # One of them overflows.
        return

    def far(bound: OracleBound) -> list[str]:
        shares = bound.shares(whole, [(1.0, own) for own in shards])
        return [name for name, share in shares.items() if not share <= 1]

    bound = context.bound(context.shards, 1.0)
    if far(bound):
        bound = OracleBound([*bound.steps, context.expected_of(ask)])
    if not (wrong := far(bound)):
        return
    chosen, _ = choose(whole, wrong, rows_of_whole(context, shards, whole, wrong), bound)
    far_by = relative_norm(add_named(shards), whole)
    where: Any = {"tensors": wrong, "distance": far_by}
    if chosen and len(chosen[0].names) == len(wrong):
        row = chosen[0].row
        # Losses may be equal by chance when their gradients are not.
        stage = "loss" if row.detail == "weighted_mean_of_means" else "gradients"
        yield context.found(stage, row.detail, row.text, **where)
        return
    text = (
        f"the gradient of the whole batch differs by {far_by:.1%} from the sum over the shards,"
        " also on one device"
    )
    yield context.found("gradients", "not_a_sum_over_examples", text, status=BY_DESIGN, **where)
