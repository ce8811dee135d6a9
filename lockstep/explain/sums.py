"""Rows of the node `sum`: what a copy is given, as a sum of what the shards sent.

The same rows serve a recording alone, where the wrapper says how it adds, an oracle, and a
comparison with a reference, whose gradient says with which factors the sum is right.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from lockstep.explain.rows import Choice, Row, choose
from lockstep.explain.solve import solve
from lockstep.explain.tensors import (
    BITS,
    SHORT,
    levels_of,
    moved_in_bucket,
    moved_parts,
    to_levels,
    to_signs,
    why_part,
    why_tensor,
)
from lockstep.explain.terms import Sums
from lockstep.numeric.arrays import (
    EPS,
    NOTHING_BUT_ROUNDING,
    Named,
    are_finite,
    dense,
    distance,
    length,
    total_norm,
)
from lockstep.numeric.tolerance import Expression

_CLOSE = 1e-4  # Relative; of solved factors to those of a pattern.
_MOST_SUBSETS = 8  # Shards of whose gradients all subsets are tried.

Rounding = Callable[[np.ndarray], np.ndarray]


def explained_sums(sums: Sums, copy: int, wrong: Sequence[str]) -> Iterator[Choice]:
    """Yields the explanations of the wrong sums of a copy."""
    left, received = list(wrong), sums.received[copy]
    for name in wrong:
        if why := _not_finite(received[name], [own[name] for own in sums.sent]):
            left.remove(name)
            yield Choice(Row(*why, []), (name,))
    # Fitted factors have an error of the same size as that of the sum.
    bound = _Wide(sums)
    chosen, left = choose(received, left, _rows(sums, copy, left), bound, 0)
    yield from chosen
    if left:
        chosen, left = choose(received, left, _solved_rows(sums, copy, left), bound, sums.num)
        yield from chosen
    for name in left:
        yield Choice(Row(*_why_one(sums, copy, name), []), (name,))


class _Wide:
    """Twice the bound of a sum: for what is predicted from rounded numbers.

    Args:
        sums: the sums.
        of_largest: whether each element has the rounding of the largest one.
    """

    def __init__(self, sums: Sums, of_largest: bool = False):
        self._sums, self._of_largest = sums, of_largest

    def shares(
        self, observed: Named, expression: Expression, names: Sequence[str] | None = None
    ) -> dict[str, float]:
        """Returns name → distance over the bound; see `Sums.shares`."""
        found = self._sums.shares(observed, expression, names, of_largest=self._of_largest)
        return {name: far / 2 for name, far in found.items()}


def _not_finite(got: np.ndarray, sent: Sequence[np.ndarray]) -> tuple[str, str] | None:
    if are_finite([got]) and not are_finite(sent):
        text = "gradients overflow, and a finite sum is received: the step is not skipped"
        return "overflow_not_skipped", text
    if not are_finite([got]) and are_finite(sent):
        text = "what is received is NaN or infinite, although what is sent is finite"
        return "not_finite", text
    return None


# --- Rows with fixed coefficients ----------------------------------------------------------------


def _rows(sums: Sums, copy: int, wrong: Sequence[str]) -> Iterator[Row]:
    """Yields rows without solved coefficients, the most specific first."""
    yield from _rows_of_clipping(sums, wrong)
    yield from _rows_of_scales(sums, copy)
    yield from _rows_of_axes(sums, copy, wrong)
    yield from _rows_of_shards(sums, copy, wrong)
    yield from _rows_of_previous(sums, copy)
    yield from _rows_of_dtypes(sums, wrong)
    yield from _rows_of_buckets(sums, copy)
    yield from _rows_of_copies(sums, copy, wrong)


def _rows_of_clipping(sums: Sums, wrong: Sequence[str]) -> Iterator[Row]:
    context, limits = sums.context, ""
    if context.computes and context.clips_sum and (limits := context.oracle.limits()):
        clipped = [context.oracle.clip(own) for own in context.named(context.kind_sent)]
        text = f"{limits} is applied on each replica, not to the sum"
        factors = map(float, sums.factors)
        yield Row("clipped_before_the_sum", text, list(zip(factors, clipped, strict=True)))


def _rows_of_scales(sums: Sums, copy: int) -> Iterator[Row]:
    scales, own = sums.loss_scales, sums.context.trace.shards_of(copy)
    if np.ptp(scales) and own:
        listed = ", ".join(f"{scale:g}" for scale in scales)
        text = f"the loss scales of the {sums.senders} are {listed}"
        yield Row("other_loss_scale", text, sums.of(sums.factors * scales / scales[own[0]]))


def _rows_of_shards(sums: Sums, copy: int, wrong: Sequence[str]) -> Iterator[Row]:
    """Yields sums of some shards' gradients, or with another number of them."""
    num, factors, context = sums.num, sums.factors, sums.context
    own = np.array([shard in context.trace.shards_of(copy) for shard in range(num)], float)
    if context.has("sums") and all(sums.received[copy] is not own for own in context.named("sums")):
        yield Row("frozen", "the gradient is 0 after the sum", [])
    else:
        yield Row("lost_replica", "the sum is 0", [])
    if num == 1:
        return
    is_mean = bool(np.allclose(factors, 1 / num))
    if is_mean:
        text = f"it is the sum of what {sums.senders} send, not the mean"
        yield Row("sum_instead_of_mean", text, sums.of(factors * num))
        text = f"the mean is divided by the {sums.senders} once more"
        yield Row("scaled_gradient", text, sums.of(factors / num))
    else:
        text = f"the gradients are averaged over {sums.senders}, not summed"
        yield Row("mean_instead_of_sum", text, sums.of(factors / num))
    if 0 < own.sum() < num and not {*wrong} <= sums.common:
        text = f"it is the gradient of the replica's own examples, not that of {sums.senders}"
        yield Row("not_all_reduced", text, sums.of(own))
        yield Row("not_all_reduced", text, sums.of(own * factors))
    for shard in range(num):
        kept, name = np.arange(num) != shard, context.trace.name_of("raw", shard)
        cause = "lost_replica" if num == context.trace.about.num_replicas else "lost_micro_batch"
        text = f"the sum does not contain the gradient of {name}"
        yield Row(cause, text, sums.of(factors * kept), (shard,))
        if is_mean:
            yield Row(cause, text, sums.of(kept / (num - 1)), (shard,))
        text = f"the sum contains the gradient of {name} twice"
        yield Row("repeated_gradient", text, sums.of(factors * (2 - kept)), (shard,))
    yield from _rows_of_replicas(sums)


def _rows_of_replicas(sums: Sums) -> Iterator[Row]:
    """Yields sums that lack all micro-batches of a replica, or have those of one only."""
    trace = sums.context.trace
    of_replica = np.array([trace.replica_of(shard) for shard in range(sums.num)])
    replicas = sorted({*of_replica.tolist()})
    for replica in replicas if len(replicas) > 1 else ():
        own = of_replica == replica
        lost = tuple(int(s) for s in np.flatnonzero(own))
        others = tuple(int(s) for s in np.flatnonzero(~own))
        for shards, kept in ((lost, ~own), (others, own)):
            names = ", ".join(trace.name_of("raw", shard) for shard in shards)
            text = f"the sum does not contain the gradient of {names}"
            for times in (1.0, sums.num / kept.sum()):
                yield Row("lost_replica", text, sums.of(sums.factors * kept * times), shards)


def _rows_of_previous(sums: Sums, copy: int) -> Iterator[Row]:
    """Yields sums of what was sent in the previous step, or added to what that step received."""
    before = sums.context.previous
    if before and before.has("sums"):
        text = "the gradients of the previous step are not cleared, and those of this one are added"
        yield Row(
            "stale_gradient", text, [*sums.of(sums.factors), (1.0, before.named("sums")[copy])]
        )
    old, factors = sums.previous, [*map(float, sums.factors)]
    if not old or any(name not in own for own in old for name in sums.kinds):
        return
    text = "the sum is that of the previous step"
    yield Row("stale_gradient", text, list(zip(factors, old, strict=True)))
    for shard in range(sums.num):
        name = sums.context.trace.name_of("raw", shard)
        text = f"the sum contains the gradient that {name} sent in the previous step"
        mixed = [*sums.sent[:shard], old[shard], *sums.sent[shard + 1 :]]
        yield Row("stale_gradient", text, list(zip(factors, mixed, strict=True)), (shard,))


def _rows_of_dtypes(sums: Sums, wrong: Sequence[str]) -> Iterator[Row]:
    """Yields sums of rounded gradients."""

    def added(parts: Sequence[np.ndarray]) -> np.ndarray:
        return np.sum([f * p for f, p in zip(sums.factors, parts, strict=True)], axis=0)

    def row(cause: str, text: str, value: Callable[..., np.ndarray], *args: Any) -> Row:
        def of_sent() -> Expression:
            sent = {name: [dense(own[name]) for own in sums.sent] for name in wrong}
            return [(1.0, {name: value(own, *args) for name, own in sent.items()})]

        # The error of a quantised element is that of the largest one.
        own = _Wide(sums, of_largest=True) if cause == "quantised" else None
        return Row(cause, text, of_sent, bound=own)

    def before(sent: Sequence[np.ndarray], rounded: Rounding) -> np.ndarray:
        return added([*map(rounded, sent)])

    def each(sent: Sequence[np.ndarray], rounded: Rounding) -> np.ndarray:
        return times * functools.reduce(lambda a, b: rounded(a + b), map(rounded, sent))

    def after(sent: Sequence[np.ndarray], rounded: Rounding) -> np.ndarray:
        return times * rounded(np.sum(sent, axis=0))

    def mean(sent: Sequence[np.ndarray], rounded: Rounding) -> np.ndarray:
        return rounded(added(sent))

    times, cause = float(sums.factors[0]), "reduced_precision"
    for dtype, rounded in SHORT.items():
        text = f"gradients are rounded to {dtype}"
        yield row(cause, f"{text} before the sum", before, rounded)
        yield row(cause, f"{text} and summed in it", each, rounded)
        yield row(cause, f"the sum is rounded to {dtype}", after, rounded)
        yield row(cause, f"the mean is rounded to {dtype}", mean, rounded)
    for number, levels in [(n, levels) for n in BITS for levels in levels_of(n)]:
        rounded = functools.partial(to_levels, levels=levels)
        yield row("quantised", f"gradients are quantised to {number} bits", before, rounded)
    yield row("quantised", "gradients are quantised to their signs", before, to_signs)


def _rows_of_axes(sums: Sums, copy: int, wrong: Sequence[str]) -> Iterator[Row]:
    """Yields sums over ranks that hold different parts of a weight, and moved parts."""
    context = sums.context
    own, *_ = *context.trace.shards_of(copy), 0
    bound = _Wide(sums, of_largest=True)
    right = {name: dense(sums.right(name)) for name in wrong}
    got = sums.received[copy]
    for axis, size in context.trace.model_axes.items():
        for whole, also in ((sums.sent[own], ""), (right, ", too")):
            for word, share in (("summed", 1.0), ("averaged", 1 / size)):
                text = f"gradients are {word} over {axis}{also}, whose ranks hold other parts"
                tiled = {n: _tiled(dense(whole[n]), size, share, got[n]) for n in wrong}
                tiled = {name: value for name, value in tiled.items() if value is not None}
                if tiled and size > 1:
                    row = Row("reduced_over_other_axis", text, [(1.0, tiled)], bound=bound)
                    yield row
    moved: dict[str, dict[str, np.ndarray]] = {}
    for name in wrong:
        for text, value in moved_parts(context, right[name]):
            moved.setdefault(text, {})[name] = value
    for text, values in moved.items():
        yield Row("swapped_parts", text, [(1.0, values)], bound=bound)


def _rows_of_buckets(sums: Sums, copy: int) -> Iterator[Row]:
    """Yields the right sums in one bucket, taken out of it in another order or place."""
    got = {name: dense(array) for name, array in sums.received[copy].items()}
    bound = _Wide(sums, of_largest=True)
    for text, values in moved_in_bucket({n: dense(sums.right(n)) for n in got}, got):
        yield Row("swapped_parts", text, [(1.0, values)], bound=bound)


def _tiled(whole: np.ndarray, size: int, share: float, like: np.ndarray) -> np.ndarray | None:
    """Returns the sum of the parts of an array in place of each part; None if it has none.

    Of the dimensions that may be split, that with which it is nearest to another array.
    """
    found = []
    for dimension, length_of in enumerate(whole.shape):
        if length_of % size == 0:
            total = share * np.sum(np.split(whole, size, dimension), axis=0)
            repeats = [size if d == dimension else 1 for d in range(whole.ndim)]
            found.append(np.tile(total, repeats))
    return min(found, key=lambda each: distance(like, each), default=None)


def _rows_of_copies(sums: Sums, copy: int, wrong: Sequence[str]) -> Iterator[Row]:
    """Yields what a copy lacks of the mean of all copies: parts that it keeps for itself."""
    others = [own for number, own in enumerate(sums.received) if number != copy]
    names = [n for n in wrong if n not in sums.common and all(n in own for own in others)]
    if names and len(sums.received) == sums.num > 1:
        right = {name: dense(sums.right(name)) for name in names}
        num = len(sums.received)
        text = (
            "the replicas receive different gradients, and their mean is the right one: each keeps"
            " a part of its own, as of micro-batches that are not all-reduced"
        )
        yield Row("not_all_reduced", text, [(float(num), right), *((-1.0, own) for own in others)])


# --- Rows with solved coefficients ---------------------------------------------------------------


def _solved_rows(sums: Sums, copy: int, wrong: Sequence[str]) -> Iterator[Row]:
    """Yields rows whose coefficients are solved from all wrong sums of a copy, then from each."""
    received = {name: sums.received[copy][name] for name in wrong}
    clear = [name for name in wrong if _is_clear(sums, received[name], name)]
    for names in ([clear] if len(clear) > 1 else []) + [[name] for name in clear]:
        coefficients, determined = solve(received, sums.sent, names)
        if determined.all() and np.isfinite(coefficients).all():
            right = sums.factors
            factors = coefficients / np.where(right == 0, 1, right)
            factors = np.where(np.abs(factors) < _CLOSE, 0, factors)
            of_names = [{name: own[name] for name in names} for own in sums.sent]
            expression = list(zip(map(float, factors * right), of_names, strict=True))
            for cause, text, items in _meanings(sums, copy, factors, {*names} <= sums.common):
                yield Row(cause, text, expression, items)


def _is_clear(sums: Sums, got: np.ndarray, name: str) -> bool:
    """Returns whether a sum is further from the right one than solved factors explain anyway."""
    parts = [f * dense(own[name]) for f, own in zip(sums.factors, sums.sent, strict=True)]
    apart = distance(got, sums.right(name))
    return 2 * length(sums.bound(name, parts)) <= NOTHING_BUT_ROUNDING * apart


def _meanings(
    sums: Sums, copy: int, factors: np.ndarray, is_common: bool
) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Yields causes, texts and shards of a sum with these factors, 1 where they are right."""
    if sums.means and np.ptp(factors) <= _CLOSE * abs(factors[0]):
        times = float(np.mean(factors))
        for cause, reason in sums.means(times):
            yield (
                cause,
                f"after the backward pass, gradients are multiplied by {times:.6g}: {reason}",
                (),
            )
    yield _meaning(sums, copy, factors, is_common)


def _meaning(
    sums: Sums, copy: int, factors: np.ndarray, is_common: bool
) -> tuple[str, str, tuple[int, ...]]:
    """Returns cause, text and shards of a sum with these factors, 1 where they are right."""
    context, num = sums.context, sums.num
    own = [] if is_common else context.trace.shards_of(copy)
    if own and all(factors[own]) and not np.any(np.delete(factors, own)) and num > 1:
        text = f"it is the gradient of the replica's own examples, not that of {sums.senders}"
        return "not_all_reduced", f"{text}, times {factors[own[0]]:.4g}", ()
    odd = tuple(int(q) for q in np.flatnonzero(np.abs(factors - 1) > _CLOSE))
    names = ", ".join(context.trace.name_of("raw", shard) for shard in odd)
    if odd and len(odd) < num and not any(factors[q] for q in odd):
        cause = "lost_replica" if num == context.trace.about.num_replicas else "lost_micro_batch"
        return cause, f"the sum does not contain the gradient of {names}", odd
    scales = np.array([context.trace.loss_scale(context.position, s) for s in range(num)])
    if np.ptp(scales) and np.ptp(factors / scales) <= _CLOSE * max(abs(factors / scales)):
        listed = ", ".join(f"{scale:g}" for scale in scales)
        text = f"gradients are added with the loss scales {listed}, and divided by one of them"
        return "other_loss_scale", text, odd if len(odd) < num else ()
    sizes = np.array(context.sizes, float) if context.has("data") else np.ones(num)
    of_means = sizes.sum() / (num * sizes) if np.ptp(sizes) and np.all(sizes) else sizes
    if np.ptp(of_means) and np.allclose(factors, of_means, rtol=_CLOSE):
        shown = "/".join(f"{size:g}" for size in sizes)
        text = f"it is the mean of the means of shards of {shown} examples, which weigh the same"
        return "mean_of_means", text, ()
    if sums.means and odd and np.ptp(factors[[*odd]]) <= _CLOSE * abs(factors[odd[0]]):
        times = float(factors[odd[0]])
        for cause, reason in sums.means(times) if len(odd) < num else ():
            if cause == "loss_scale_left":
                text = f"the gradient of {names} is multiplied by {times:.6g}: {reason}"
                return cause, text, odd
    norms = [total_norm(own) * f for own, f in zip(sums.sent, factors, strict=True)]
    are_smaller = np.all((factors > 0) & (factors < 1)) and np.ptp(factors) > _CLOSE * factors[0]
    if are_smaller and np.allclose(norms, norms[0], rtol=_CLOSE):
        text = f"each replica's gradient is clipped to norm {norms[0]:.4g} before the sum"
        return "clipped_before_the_sum", text, ()
    shown = ", ".join(f"{factor:.8g}" for factor in factors)
    text = f"the sum contains the gradients of the {sums.senders} multiplied by {shown}"
    return "scaled_gradient", text, odd if len(odd) < num else ()


# --- One tensor, in parts ------------------------------------------------------------------------


def _why_one(sums: Sums, copy: int, name: str) -> tuple[str, str]:
    """Explains one sum that no row explains as a whole."""
    got, right = sums.received[copy][name], sums.right(name)
    if np.shape(dense(got)) != np.shape(dense(right)):
        return "unexplained", f"the sum has shape {np.shape(got)}, not {np.shape(right)}"
    return _sum_of_some(sums, name, dense(got)) or why_tensor(got, right, 0.0, sums.num)


def _why_part(sums: Sums, name: str, got: np.ndarray) -> tuple[str, str] | None:
    """Explains a sum of which a few rows or columns are 0, or have a factor."""
    right = dense(sums.right(name))
    parts = [f * dense(own[name]) for f, own in zip(sums.factors, sums.sent, strict=True)]
    limit = max(length(sums.bound(name, parts)), 64 * EPS * length(right))
    found = why_part(got, right, limit)
    return found if found and found[0] != "unexplained" else None


def _sum_of_some(sums: Sums, name: str, got: np.ndarray) -> tuple[str, str] | None:
    """Explains a sum that is right in some elements and lacks or repeats a shard in the others."""
    parts = [f * dense(own[name]) for f, own in zip(sums.factors, sums.sent, strict=True)]
    rows = np.stack([part.ravel() for part in parts])
    flat, limit, num = got.ravel(), sums.bound(name, parts).ravel(), len(rows)
    total = rows.sum(axis=0)
    wrong = np.abs(total - flat) > limit
    if num > _MOST_SUBSETS or not wrong.any():
        return None

    def fit(terms: np.ndarray) -> np.ndarray:
        return np.abs(terms - flat)[wrong] <= 2 * limit[wrong]

    where = np.flatnonzero(wrong)
    # A part that is sent on its own, and not the rows or columns that a script changes.
    is_range = len(where) == where[-1] - where[0] + 1 > math.prod(got.shape[1:])
    if not is_range and (why := _why_part(sums, name, got)):
        return why
    shown = f"in {np.mean(wrong):.0%} of the elements, numbers {where[0]} to {where[-1]},"
    is_zero = not np.any(flat[wrong])
    if not is_zero and np.any([fit(row) for row in rows], axis=0).all():
        return "own_gradient_only", f"{shown} it is the gradient of one replica, not the sum"
    is_double = fit(2 * total).all()  # Also if the others have no part in it.
    if is_range if is_double else np.any([fit(total + row) for row in rows], axis=0).all():
        return (
            "repeated_gradient",
            f"{shown} the gradient of a replica, or all of it, is added twice",
        )
    found = np.zeros(len(where), bool)
    for subset in range(1 << num):
        chosen = [shard for shard in range(num) if subset >> shard & 1]
        found |= fit(rows[chosen].sum(axis=0))
    if found.all():
        return "sparsified", f"{shown} the part of some replicas is 0"
    return None
