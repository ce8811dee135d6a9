"""Explains a wrong sum of gradients."""

import functools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.arithmetic import (
    EPS,
    NOTHING_BUT_ROUNDING,
    UNITS,
    add,
    are_finite,
    dense,
    distance,
    fitted,
    is_within,
    length,
    plain,
    same_bits,
    scaled,
    sum_bound,
    total_norm,
    unit_of,
)
from lockstep.context import Context
from lockstep.hypotheses.of_tensors import (
    BITS,
    SHORT,
    levels_of,
    moved_parts,
    to_levels,
    to_signs,
    why_tensor,
)
from lockstep.trace import Array

Why = tuple[str, str, tuple[int, ...]]  # Cause, text, and shards if other than the receiver.


class SumOf:
    """The sum of a gradient that a copy received.

    Args:
        context: the step.
        copy: the copy.
        name: name of the weight.

    Attributes:
        copy: the copy.
        got: what was received.
        sent: the gradients that each shard sent; 0 of a shard that has none.
        share: factor of the sum: 1, or one over the number of shards for a mean.
        right: the sum, or the mean, of what was sent.
    """

    def __init__(self, context: Context, copy: int, name: str):
        self.context, self.copy, self.name = context, copy, name
        self.got = context.named("sums")[copy][name]
        zero = np.zeros_like(plain(self.got))
        self.sent = [gradients.get(name, zero) for gradients in context.named(context.kind_sent)]
        self.share = context.share(0)
        self.right = add(self.sent) if self.share == 1 else scaled(add(self.sent), self.share)

    @functools.cached_property
    def parts(self) -> list[np.ndarray]:
        """The terms of the sum: what each shard sent, multiplied by `share`."""
        return [self.share * dense(gradient) for gradient in self.sent]

    @functools.cached_property
    def bound(self) -> np.ndarray:
        """The bound of each element's error."""
        unit = UNITS.get(self.context.trace.about.reduced_in, EPS)
        own = [unit_of(plain(gradient)) for gradient in self.sent if np.any(dense(gradient))]
        unit = max(unit, min(own, default=EPS))  # Of 16-bit weights.
        if self.context.computes:
            unit = max(unit, self.context.oracle.units.get(self.name, EPS))
        bound, axes = sum_bound(self.parts, unit), self.context.trace.model_axes
        if axes:  # Each part is a sum over ranks, whose terms may cancel.
            bound = np.full_like(bound, math.prod(axes.values()) * np.max(bound, initial=0))
        return bound

    @property
    def item(self) -> int | None:
        """The copy that received it; None if all received the same."""
        received = [sums[self.name] for sums in self.context.named("sums") if self.name in sums]
        return None if all(same_bits(other, self.got) for other in received) else self.copy

    def is_right(self) -> bool:
        """Measures the sum; returns whether it is right."""
        same = same_bits(self.got, self.right)
        allowed = 0.0 if same else length(self.bound)
        where = self.name, "sums", self.copy
        self.context.measure(*where, self.got, self.right, allowed, same=same)
        return same or is_within(self.got, self.right, self.bound)


def why_sum(asked: SumOf, known: list[np.ndarray]) -> Why:
    """Explains a wrong sum.

    Args:
        asked: the sum.
        known: factors of the shards in the sums of other tensors; new ones are added.
    """
    got, parts, bound = asked.got, asked.parts, asked.bound
    sums = dense(got)
    if sums.shape != bound.shape:
        return "unexplained", f"the sum has shape {sums.shape}, not {bound.shape}", ()
    if are_finite([got]) and not are_finite(parts):
        text = "gradients overflow, and a finite sum is received: the step is not skipped"
        return "overflow_not_skipped", text, ()
    if not are_finite([got]) and are_finite(parts):
        text = "what is received is NaN or infinite, although what is sent is finite"
        return "not_finite", text, ()
    for cause, text, items, others in _of_other_parts(asked):
        limit, total = sum_bound(others), np.sum(others, axis=0)
        if cause == "clipped_before_the_sum":
            limit = 2 * limit  # The factor of the clipping, and each product with it, are rounded.
        if (
            np.any(sums)
            and is_within(got, total, limit)
            and not is_within(asked.right, total, bound)
        ):
            return cause, text, items
    rows = np.stack([part.ravel() for part in parts])
    apart = distance(got, asked.right)
    for factors in _factors(asked, rows, known):
        # Fitted factors have an error of the same size as that of the sum.
        predicted = [factor * part for factor, part in zip(factors, parts, strict=True)]
        limit = 2 * np.maximum(sum_bound(predicted), bound)
        if length(limit) > NOTHING_BUT_ROUNDING * apart:
            continue  # Such factors would explain any sum.
        if is_within(got, np.sum(predicted, axis=0), limit):
            known.append(factors)
            return _why_factors(asked, np.where(np.abs(factors) < 1e-3, 0, factors))
    if asked.share != 1 and asked.item is not None:
        received = [sums.get(asked.name) for sums in asked.context.named("sums")]
        if all(np.shape(dense(each)) == sums.shape for each in received if each is not None):
            every = [asked.share * dense(each) for each in received if each is not None]
            if is_within(np.sum(every, axis=0), asked.right, sum_bound(every) + bound):
                text = (
                    "the replicas receive different gradients, and their mean is the right one:"
                    " each keeps a part of its own, as of micro-batches that are not all-reduced"
                )
                return "not_all_reduced", text, ()
    for cause, text, candidate in reduced_sums(asked.sent):
        # The error of a quantised element is that of the largest one.
        if is_within(got, asked.share * candidate, bound.max() if cause == "quantised" else bound):
            return cause, text, ()
    for text, parts in _over_model_axes(asked):
        if is_within(got, np.sum(parts, axis=0), sum_bound(parts) + np.max(bound)):
            return "reduced_over_other_axis", text, ()
    for text, moved in moved_parts(asked.context, dense(asked.right)):
        if is_within(got, moved, np.max(bound)):
            return "swapped_parts", text, ()
    if found := _sum_of_some(sums, rows, bound):
        return *found, ()
    return *why_tensor(got, asked.right, 0.0, len(parts)), ()


def _over_model_axes(asked: SumOf) -> Iterator[tuple[str, list[np.ndarray]]]:
    """Yields the terms of sums over ranks that hold different parts of a weight, in words."""
    own, *_ = *asked.context.trace.shards_of(asked.copy), 0
    for axis, size in asked.context.trace.model_axes.items():
        for whole, also in ((dense(asked.sent[own]), ""), (dense(asked.right), ", too")):
            for dimension in range(whole.ndim):
                if size == 1 or whole.shape[dimension] % size:
                    continue
                for word, share in (("summed", 1), ("averaged", 1 / size)):
                    terms = [share * part for part in np.split(whole, size, dimension)]
                    text = f"gradients are {word} over {axis}{also}, whose ranks hold other parts"
                    repeats = [size if d == dimension else 1 for d in range(whole.ndim)]
                    yield text, [np.tile(term, repeats) for term in terms]


def _of_other_parts(
    asked: SumOf,
) -> Iterator[tuple[str, str, tuple[int, ...], list[np.ndarray]]]:
    """Yields cause, text, shards and parts of sums of clipped or of previous gradients."""
    context, name, parts, kind = asked.context, asked.name, asked.parts, asked.context.kind_sent
    oracle = context.oracle if context.computes else None
    is_sent = all(name in own for own in context.named(kind))
    if oracle and is_sent and context.clips_sum and (limits := oracle.limits()):
        text = f"{limits} is applied on each replica, not to the sum"
        clipped = [oracle.clip(sent)[name] for sent in context.named(kind)]
        yield "clipped_before_the_sum", text, (), [asked.share * dense(g) for g in clipped]
    previous = context.previous
    if not (previous and previous.has(kind) and all(name in own for own in previous.named(kind))):
        return
    old = [asked.share * dense(sent[name]) for sent in previous.named(kind)]
    yield "stale_gradient", "the sum is that of the previous step", (), old
    for shard in range(len(parts)):
        whose = context.trace.name_of("raw", shard)
        text = f"the sum contains the gradient that {whose} sent in the previous step"
        mixed = [*parts[:shard], old[shard], *parts[shard + 1 :]]
        yield "stale_gradient", text, (shard,), mixed


def _factors(asked: SumOf, rows: np.ndarray, known: Sequence[np.ndarray]) -> Iterator[np.ndarray]:
    """Yields factors of the shards' parts that may give the sum: simple, known, fitted."""
    context, item, num = asked.context, asked.item, len(rows)
    yield np.full(num, 1 / num if asked.share == 1 else float(num))
    if item is not None:
        own = context.trace.shards_of(item)
        yield np.array([shard in own for shard in context.shards], float)
    yield from 1 - np.eye(num)
    if asked.share != 1:
        scales = _loss_scales(context)
        yield from (scales / scales[shard] for shard in context.trace.shards_of(asked.copy)[:1])
    yield from known
    sums = dense(asked.got).ravel()
    if sums.size > num and np.isfinite(factors := fitted(rows.T, sums)).all():
        yield factors


def _why_factors(asked: SumOf, factors: np.ndarray) -> Why:
    """Explains a sum of the shards' gradients with these factors, 1 where they are right."""
    context, item, num = asked.context, asked.item, len(factors)
    is_split = num > context.trace.about.num_replicas
    senders = f"{num} {'micro-batches' if is_split else 'replicas'}"
    if np.allclose(factors, 1 / num, rtol=1e-3):
        if asked.share != 1:
            return "scaled_gradient", f"the mean is divided by the {senders} once more", ()
        text = f"the gradients are averaged over {senders}, not summed"
        return "mean_instead_of_sum", text, ()
    if asked.share != 1 and np.allclose(factors, num, rtol=1e-3):
        return "sum_instead_of_mean", f"it is the sum of what {senders} send, not the mean", ()
    scales, own = _loss_scales(context), context.trace.shards_of(asked.copy)
    if own and np.ptp(scales) and np.allclose(factors * scales[own[0]], scales, rtol=1e-3):
        listed = ", ".join(f"{scale:g}" for scale in scales)
        return "other_loss_scale", f"the loss scales of the {senders} are {listed}", ()
    if item is not None and own and all(factors[own]) and not np.any(np.delete(factors, own)):
        times = "" if np.allclose(factors[own], 1, rtol=1e-3) else f", times {factors[own[0]]:.4g}"
        text = f"it is the gradient of this replica, not the sum over {senders}{times}"
        return "not_all_reduced", text, ()
    if not np.any(factors):
        return "lost_replica", "the sum is 0", ()
    divisor = num / np.count_nonzero(factors)
    if asked.share != 1 and np.allclose(factors[factors != 0], divisor, rtol=1e-3):
        factors = factors / divisor  # The mean of some shards.
    odd = tuple(int(q) for q in np.flatnonzero(np.abs(factors - 1) > 1e-3))
    names = ", ".join(context.trace.name_of("raw", shard) for shard in odd)
    if odd and not any(factors[q] for q in odd):
        num_lost = len({context.trace.replica_of(q) for q in odd})
        is_whole = num_lost * num == len(odd) * context.trace.about.num_replicas
        cause = "lost_replica" if is_whole else "lost_micro_batch"
        return cause, f"the sum does not contain the gradient of {names}", odd
    if odd and np.allclose(factors[list(odd)], 2, rtol=1e-3) and len(odd) < num:
        return "repeated_gradient", f"the sum contains the gradient of {names} twice", odd
    sizes = np.array(context.sizes) if context.has("data") else np.ones(num)
    if len(set(sizes.tolist())) > 1 and np.all(sizes):
        of_means = sizes.sum() / (num * sizes)
        if np.allclose(factors, of_means, rtol=1e-3):
            shown = "/".join(map(str, sizes.tolist()))
            text = (
                f"it is the mean of the means of shards of {shown} examples, which weigh the same"
            )
            return "mean_of_means", text, ()
    norms = [total_norm(sent) * f for sent, f in zip(context.named("raw"), factors, strict=True)]
    are_smaller = np.all((factors > 0) & (factors < 1)) and np.ptp(factors) > 1e-3 * factors[0]
    if are_smaller and np.allclose(norms, norms[0], rtol=1e-3):
        text = f"each replica's gradient is clipped to norm {norms[0]:.4g} before the sum"
        return "clipped_before_the_sum", text, ()
    shown = ", ".join(f"{factor:.{4 if odd else 8}g}" for factor in factors)
    text = f"the sum contains the gradients of the {senders} multiplied by {shown}"
    return "scaled_gradient", text, odd if len(odd) < num else ()


def _loss_scales(context: Context) -> np.ndarray:
    return np.array([context.trace.loss_scale(context.position, s) for s in context.shards])


def reduced_sums(parts: Sequence[Array]) -> Iterator[tuple[str, str, np.ndarray]]:
    """Yields (cause, text, sum) for gradients that are sent in a lower precision."""
    arrays = [dense(part) for part in parts]
    for name, rounded in SHORT.items():
        short = [rounded(array) for array in arrays]
        text = f"gradients are rounded to {name}"
        yield "reduced_precision", f"{text} before the sum", np.add.reduce(short, dtype=np.float64)
        added = short[0]
        for array in short[1:]:
            added = rounded(added + array)
        yield "reduced_precision", f"{text} and summed in it", added
        whole = rounded(np.sum(arrays, axis=0))
        yield "reduced_precision", f"the sum is rounded to {name}", whole
    for bits in BITS:
        for levels in levels_of(bits):
            sent = [to_levels(array, levels) for array in arrays]
            yield "quantised", f"gradients are quantised to {bits} bits", np.sum(sent, axis=0)
    signs = [to_signs(array) for array in arrays]
    yield "quantised", "gradients are quantised to their signs", np.sum(signs, axis=0)


def _sum_of_some(sums: np.ndarray, rows: np.ndarray, bound: np.ndarray) -> tuple[str, str] | None:
    """Explains a sum that is right in some elements and lacks or repeats a shard in the others."""
    flat, limit, num = sums.ravel(), bound.ravel(), len(rows)
    total = rows.sum(axis=0)
    wrong = np.abs(total - flat) > limit
    if num > 8 or not wrong.any():
        return None

    def fit(terms: np.ndarray) -> np.ndarray:
        return np.abs(terms - flat)[wrong] <= 2 * limit[wrong]

    where = np.flatnonzero(wrong)
    shown = f"in {np.mean(wrong):.0%} of the elements, numbers {where[0]} to {where[-1]},"
    if np.any([fit(row) for row in rows], axis=0).all():
        return "own_gradient_only", f"{shown} it is the gradient of one replica, not the sum"
    if fit(2 * total).all() or np.any([fit(total + row) for row in rows], axis=0).all():
        return (
            "row_of_two_parts",
            f"{shown} the gradient of a replica, or all of it, is added twice",
        )
    found = np.zeros(len(where), bool)
    for subset in range(1 << num):
        chosen = [shard for shard in range(num) if subset >> shard & 1]
        found |= fit(rows[chosen].sum(axis=0))
    if found.all():
        return "sparsified", f"{shown} the part of some replicas is 0"
    return None
