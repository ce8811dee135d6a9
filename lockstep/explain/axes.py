"""Explains gradients by the axes of a mesh: parts of a sum that is not reduced, its size."""

from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from lockstep.answer.text import count
from lockstep.context import Context
from lockstep.explain.random_layers import draws
from lockstep.numeric.arrays import (
    Array,
    Named,
    dense,
    factor_of,
    is_far,
    norm,
    rows_of,
    same_bits,
    scaled_all,
    total_norm,
)
from lockstep.reference import StepPair

_CLOSE = 1e-3  # Relative; of gradients that have a common factor.


def not_reduced(pair: StepPair) -> Iterator[tuple[str, str, list[str]]]:
    """Yields cause, sentence, and the weights of whose gradients each rank has a summand only.

    Along an axis, the ranks then update the weights with different gradients, and their sum or mean
    is that of the reference.
    """
    step, mesh = pair.second, pair.second.trace.mesh
    left = [] if step.is_wrong("all-reduce") else [*pair.gradients.names]
    for axis in mesh.axes if mesh else ():
        ranks = mesh.along(axis, 0) if mesh else []
        own = [pair.matching.to_first(step.entering(r) or step.applied(r)) for r in ranks]
        odd = [name for name in left if _differs(step, pair.in_second(name), name, ranks, own)]
        if not odd:
            continue
        own = [scaled_all(each, 1 / _common_factor(pair, each)) for each in own]
        odd = [name for name in odd if any(is_far(g[name], own[0][name], _CLOSE) for g in own[1:])]
        for word, share in (("sum", 1.0), ("mean", 1 / len(ranks))):
            found = _that_give(pair, odd, [scaled_all(each, share) for each in own])
            left = [name for name in left if name not in found]
            if found:
                is_of_model = axis in step.trace.model_axes
                yield (
                    "partial_not_reduced" if is_of_model else "not_all_reduced",
                    f"each rank along {axis} has its own part of the gradients of"
                    f" {count('weight', len(found))}: their {word} over {axis} is right, and is"
                    " not reduced",
                    found,
                )


def unlike_on_axes(pair: StepPair, wrong: Collection[str]) -> str:
    """Returns a sentence if ranks have different gradients of a weight that each of them holds.

    Each has a summand, which is no multiple of the reference's gradient. Which sum within the
    backward pass lacks it is not known.
    """
    step, mesh = pair.second, pair.second.trace.mesh
    if any(draws(step, shard) for shard in step.shards):
        return ""
    reference = pair.gradients.reference
    for axis in step.trace.model_axes if mesh else ():
        ranks = mesh.along(axis, 0) if mesh else []
        own = [pair.matching.to_first(step.entering(r) or step.applied(r)) for r in ranks]
        odd = [n for n in wrong if _differs(step, pair.in_second(n), n, ranks, own)]
        odd = [n for n in odd if all(_is_no_multiple(each[n], reference[n]) for each in own)]
        if odd:
            return (
                f"the ranks along {axis} have different gradients of {count('weight', len(odd))}"
                " that each of them holds whole: their backward passes lack a sum over it"
            )
    return ""


def _is_no_multiple(gradient: Array, right: Array) -> bool:
    return is_far(gradient, factor_of([gradient], [right]) * dense(right), _CLOSE)


def _differs(
    step: Context, name: str, of_first: str, ranks: Sequence[int], own: Sequence[Named]
) -> bool:
    """Returns whether ranks have different gradients of a weight, and update it differently."""
    gradients = [each[of_first] for each in own if norm(each.get(of_first, 0.0))]
    if len(gradients) < len(ranks) or not any(is_far(g, gradients[0]) for g in gradients[1:]):
        return False
    after = [step.named("after")[rank].get(name) for rank in ranks] if step.has("after") else []
    return not after or not all(x is not None and same_bits(x, after[0]) for x in after)


def _common_factor(pair: StepPair, own: Named) -> float:
    """Returns by what a rank multiplies all gradients that are right up to that, as it clips; or 1.

    A rank that clips by the norm of wrong gradients changes the right ones, too.
    """
    first, factors = pair.gradients.reference, list[float]()
    for name in first:
        if name in own and norm(first[name]):
            factor = factor_of([own[name]], [first[name]])
            if factor > 0 and not is_far(own[name], factor * dense(first[name]), _CLOSE):
                factors.append(factor)
    middle = sorted(factors)[len(factors) // 2] if factors else 1.0
    is_common = sum(abs(factor - middle) < _CLOSE * middle for factor in factors) > 1
    return middle if is_common else 1.0


def _that_give(pair: StepPair, names: Sequence[str], terms: Sequence[Named]) -> list[str]:
    """Returns the names of the gradients of the reference that are the sum of some terms."""
    first = {name: pair.gradients.reference[name] for name in names}
    wrong = pair.tolerance.wrong(first, *terms)
    return [name for name in names if name not in wrong]


def clipped_by_local_norm(pair: StepPair) -> tuple[str, str] | None:
    """Explains gradients that each rank clips by the norm of the parts that it holds itself."""
    trace, position = pair.second.trace, pair.second.position
    limit, size = total_norm(pair.gradients.reference_applied), pair.gradients.size
    if not trace.mesh or limit > (1 - _CLOSE) * size:
        return None
    norms, factors, counted = list[float](), list[float](), set[str]()
    for rank in trace.copies:
        kinds = ("unclipped", "sums", "raw")
        before = next(filter(None, (trace.local(position, kind, rank) for kind in kinds)), {})
        after = trace.local(position, "clipped", rank)
        if not (before and before.keys() <= after.keys()):
            return None
        # Of copies on several ranks, one may count.
        for names in ([*before], [name for name in before if name not in counted]):
            own = total_norm({name: before[name] for name in names})
            factor = min(1.0, limit / own) if own else 1.0
            if not any(is_far(after[n], factor * dense(g), _CLOSE) for n, g in before.items()):
                norms.append(own)
                factors.append(factor)
                break
        else:
            return None
        whole = trace.named(position, "clipped", rank) or {}
        counted |= {n for n, x in before.items() if n in whole and x.shape == whole[n].shape}
    if max(norms) <= limit or np.ptp([limit / size, *factors]) <= _CLOSE * max(factors):
        return None
    listed = ", ".join(f"{each:.4g}" for each in norms)
    text = f"each rank clips to norm {limit:.4g} by the norm of the parts that it holds"
    return "clipped_by_local_norm", f"{text}, {listed}, and not by that of all, {size:.4g}"


def clipped_by_hand(pair: StepPair, *, is_local: bool = False) -> tuple[str, str] | None:
    """Explains gradients that a script multiplies by hand, by the norm that gives the factor.

    What enters is right, and the reference multiplies the same gradients by a smaller number than
    1, which leaves a norm: that number times this norm is what the gradients should be clipped to.

    Args:
        pair: the step.
        is_local: whether only norms of parts explain them.
    """
    trace, position = pair.second.trace, pair.second.position
    of_first = "unclipped" if pair.first.has("unclipped") else "raw"
    raw = pair.first.named(of_first) if pair.first.has(of_first) else []
    kind = next((x for x in ("unclipped", "sums") if pair.second.has(x)), "raw")
    if len(raw) != 1 or not trace.mesh or not pair.second.has(kind, "clipped"):
        return None
    whole, names = raw[0], {p.second: p.first for p in pair.matching.pairs}
    usual = _factor_of_all(pair.gradients.reference_applied, whole)
    is_added = kind == "raw" and len(pair.second.shards) > 1  # No rank has kept the sum.
    added = _added(pair, whole) if is_added else {}
    given = added or pair.matching.to_first(pair.second.named(kind)[0])
    if is_added and {*given} != {*pair.gradients.names}:
        return None
    if not 0 < usual < 1 - _CLOSE or any(is_far(given[n], whole[n], _CLOSE) for n in given):
        return None
    factors = list[float]()
    held, shared = list[Named](), list[Named]()
    for rank in trace.copies:
        own, left = (trace.local(position, each, rank) for each in (kind, "clipped"))
        is_part = {n: np.shape(own[n]) != np.shape(whole[names[n]]) for n in own if n in names}
        if not is_part or not left:
            return None
        own = own | {n: given[names[n]] for n, each in is_part.items() if is_added and not each}
        factors.append(_factor_of_all(left, own))
        held.append({n: own[n] for n, each in is_part.items() if each})
        shared.append({n: own[n] for n, each in is_part.items() if not each})
    if not all(factor > 0 for factor in factors):
        return None
    norms = np.zeros(len(held))
    for size_of, noun in ((total_norm, "norm"), (_largest, "largest element")):
        size = size_of(whole)
        found = usual * size / np.array(factors)  # The norm by which each rank has divided.
        if not np.any(np.abs(found - size) > _CLOSE * size):
            return None
        parts, copies = (np.array([*map(size_of, own)]) for own in (held, shared))
        is_largest = size_of is _largest
        own_norms = np.maximum(parts, copies) if is_largest else np.hypot(parts, copies)
        norms = norms if is_largest else own_norms
        for text, each in _known_norms(parts, copies, own_norms, is_largest=is_largest).items():
            if np.all(np.abs(found - each) <= _CLOSE * found):
                listed = ", ".join(f"{x:.4g}" for x in dict.fromkeys(found.tolist()))
                text = f"each rank clips by a {noun} {text}, {listed}, and not by that of all"
                return "clipped_by_local_norm", f"{text}, {size:.4g}"
    if np.ptp(factors) > _CLOSE * max(factors):
        norms_left = norms * factors
        is_of_each = np.ptp(norms_left) <= _CLOSE * max(norms_left)
        text = f"each rank clips the parts that it holds to a norm of {norms_left[0]:.4g}"
        return ("clipped_by_local_norm", text) if is_of_each else None
    if is_local:
        return None
    text = f"gradients are multiplied by {usual:.6g} in the first recording"
    return "other_clipping", f"{text} and by {factors[0]:.6g} in the second"


def _largest(gradients: Named) -> float:
    """Returns the size of the largest element of all gradients."""
    return max((float(np.max(np.abs(dense(g)), initial=0)) for g in gradients.values()), default=0)


def _known_norms(
    parts: np.ndarray, copies: np.ndarray, held: np.ndarray, *, is_largest: bool
) -> dict[str, np.ndarray]:
    """Returns the norms by which ranks may divide wrongly, in words.

    Args:
        parts: of each rank, that of the parts that it holds.
        copies: that of the weights that it holds as others do.
        held: that of both.
        is_largest: whether they are largest elements, which do not add up as squares.
    """
    known = {"of the parts that it holds": held}
    if not is_largest:
        of_parts = np.hypot(norm(parts), copies[0])
        known["of all ranks, of which several hold the same"] = np.asarray(norm(held))
        known["of the parts of all ranks, of which several hold the same"] = of_parts
    sums = "that is the sum of those of the ranks" + ("" if is_largest else ", not of squares")
    known |= {
        "that is the mean of those of the ranks": np.mean(held),
        sums: np.sum(held) if is_largest else np.sum(parts) + copies[0],
    }
    return known | {f"of the parts of rank {r}": each for r, each in enumerate(held)}


def _added(pair: StepPair, whole: Named) -> Named:
    """Returns the gradients of the reference that are sums, or means, of what the shards send.

    Of a weight whose gradient gets the examples of all shards in the backward pass, each of them
    sends the whole sum.
    """
    raw, found = pair.gradients.raw, Named()
    for name in pair.gradients.names if raw else ():
        total = np.sum([own[name] for own in raw], axis=0)
        factor = factor_of([total], [whole[name]])
        known = any(abs(factor - times) < _CLOSE * times for times in (1 / len(raw), 1, len(raw)))
        if known and not is_far(total, factor * dense(whole[name]), _CLOSE):
            found[name] = dense(whole[name])
    return found


def _factor_of_all(applied: Named, sent: Named) -> float:
    """Returns the factor of all gradients; NaN if they do not have one."""
    names = [name for name in applied if name in sent and norm(sent[name])]
    factor = factor_of([applied[n] for n in names], [sent[n] for n in names])
    is_common = not any(is_far(applied[n], factor * dense(sent[n]), _CLOSE) for n in names)
    return factor if is_common else np.nan


def reduced_over_parts(pair: StepPair, wrong: Collection[str] = ()) -> tuple[str, str] | None:
    """Explains gradients that a script reduces over ranks that hold other parts of a weight.

    Args:
        pair: the step.
        wrong: the checked trace's names of weights that have to be among them.
    """
    trace, first = pair.second.trace, pair.gradients.reference
    kind = "unclipped" if pair.second.has("unclipped") else "clipped"
    found = dict[str, list[str]]()  # Sentence without the axis → axes.
    for axis in trace.mesh.axes if trace.mesh else ():
        ranks = trace.mesh.along(axis, 0) if trace.mesh else []
        held = [trace.local(pair.second.position, kind, rank) for rank in ranks]
        held = [pair.matching.to_first(own) for own in held]
        for word, share in (("averaged", 1 / len(ranks)), ("summed", 1.0)):
            names = [
                name
                for name, whole in first.items()
                if all(name in own for own in held)
                and _is_sum_of_parts(dense(whole), [dense(own[name]) for own in held], share)
            ]
            is_of_all = {*wrong} <= {*map(pair.in_second, names)}
            if names and len(ranks) > 1 and is_of_all:
                text = f"gradients of {count('weight', len(names))} are {word}"
                found.setdefault(text, []).append(axis)
    for text, axes in found.items():
        # Where they are the sum over all ranks, each axis may be that of the parts.
        where = f"{axes[0]}, whose ranks" if len(axes) == 1 else "ranks that"
        return "reduced_over_other_axis", f"{text} over {where} hold other parts"
    return None


def _is_sum_of_parts(whole: np.ndarray, held: Sequence[np.ndarray], share: float) -> bool:
    """Returns whether each rank holds the sum of all parts of an array, in place of its own."""
    shape, size = held[0].shape, len(held)
    split = [d for d in range(whole.ndim) if shape[d : d + 1] != whole.shape[d : d + 1]]
    if len(split) != 1 or shape[split[0]] * size != whole.shape[split[0]]:
        return False
    parts = np.split(whole, size, split[0])
    total = share * np.sum(parts, axis=0)
    is_total = not any(is_far(own, total, _CLOSE) for own in held)
    return is_total and any(is_far(part, total, _CLOSE) for part in parts)


def order_of_parts(first: np.ndarray, second: np.ndarray, axes: Mapping[str, int]) -> str:
    """Explains rows by parts of a sequence in another order; "" if they are not.

    Args:
        first, second: rows of the reference and of the checked trace.
        axes: the axes over which a sequence may be split, with their sizes.
    """
    if first.shape != second.shape or first.ndim < 2:
        return ""
    for axis, num in axes.items():
        zigzag = [place for rank in range(num) for place in (rank, 2 * num - 1 - rank)]
        for order, held, named in (
            (zigzag, "one after another", "in zigzag order"),
            ([*np.argsort(zigzag)], "in zigzag order", "one after another"),
        ):
            if num > 1 and first.shape[1] % len(order) == 0:
                parts = np.split(second, len(order), axis=1)
                if rows_of([np.concatenate([parts[i] for i in order], 1)]) == rows_of([first]):
                    return f"the ranks along {axis} hold parts {held}, recorded as {named}"
    return ""


def sizes_of_axes(pair: StepPair) -> list[tuple[float, str, str]]:
    """Returns the factors that the sizes of axes make, with cause and reason."""
    found = list[tuple[float, str, str]]()
    for axis, size in pair.second.trace.model_axes.items():
        if size > 1:
            found.append((size, "sum_instead_of_mean", f"the size of {axis}"))
            found.append((1 / size, "mean_instead_of_sum", f"one over the size of {axis}"))
    return found
