"""Explains gradients by what each backward pass of a step adds, where it has several.

A script or an engine sums the gradients of micro-batches, reduces and clips them. With c, the
factor with which the passes of all shards give the reference's gradient, what a copy is given is
c · Σ f · pass. A factor f that is not 1 tells which passes are lost, repeated, not reduced, or
clipped. The factors are solved from all wrong gradients, and confirmed by the bound.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.explain.kept import recurrences
from lockstep.explain.rows import Row
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import EPS, Named, dense, is_far, scaled_all, total_norm
from lockstep.reference import StepPair
from lockstep.step import Gradients

_CLOSE = 1e-3  # Relative; of solved factors to 0 and 1, and to each other.
Why = tuple[str, str, str]  # Stage, detail and sentence.


class _Term(NamedTuple):
    """What a backward pass of a shard adds to the gradients, by the reference's names."""

    shard: int
    number: int
    gradients: Named


def _terms(gradients: Gradients, names: Sequence[str]) -> list[_Term]:
    """Returns the passes that have some of the gradients; none if one has no pass."""
    found = [
        _Term(shard, number, {name: own[name] for name in names if name in own})
        for shard, passes in enumerate(gradients.backward_passes)
        for number, own in enumerate(passes)
    ]
    known = {name for term in found for name in term.gradients}
    return [term for term in found if total_norm(term.gradients)] if known >= {*names} else []


def sums_of_backward_passes(pair: StepPair) -> Iterator[tuple[Why, list[str]]]:
    """Yields an explanation of what the copies are given, with the reference's names."""
    names = [*pair.different_gradients]
    terms = _terms(pair.gradients, names)
    if not terms:
        return
    right = {name: pair.gradients.reference[name] for name in names}
    factor, known = solve(right, [_sum_of(terms, names)])
    share = float(factor[0])
    is_right = bool(known.all()) and share > 0
    if not is_right or not pair.tolerance.fits(right, [(share, t.gradients) for t in terms], names):
        return
    found = dict[str, Why]()
    for copy, given in enumerate(pair.gradients.given):
        if wrong := [*pair.tolerance.wrong({n: given[n] for n in names}, right)]:
            why = _why(pair, terms, share, copy, wrong)
            if why is None:
                return
            found.setdefault(why[1], why)
    for why in found.values():
        yield why, names


def _sum_of(terms: Sequence[_Term], names: Sequence[str]) -> Named:
    return {
        name: np.sum([t.gradients[name] for t in terms if name in t.gradients], axis=0)
        for name in names
    }


def _why(
    pair: StepPair, terms: Sequence[_Term], share: float, copy: int, names: Sequence[str]
) -> Why | None:
    """Explains what a copy is given."""
    given = {name: pair.gradients.given[copy][name] for name in names}
    if factors := _solved(pair, terms, share, given):
        return _meaning(pair, [t for t, _ in factors], np.array([f for _, f in factors]), copy)
    if limit := _limit_of_values(pair, terms, share, given):
        text = f"the values of the gradients of each backward pass are clipped to {limit:.4g}"
        return "gradients", "clipped_in_each_micro_batch", f"{text}, not only their sum"
    before = pair.gradients.previous
    old = _terms(before, names) if before else []
    if old and (factors := _solved(pair, [*terms, *old], share, given)):
        numbers = sorted({t.number for t, f in factors[-len(old) :] if f})
        text = "the gradients of backward passes of the step before are added, those of"
        return "gradients", "stale_gradient", f"{text} {_listed(numbers)}"
    return None


def _solved(
    pair: StepPair, terms: Sequence[_Term], share: float, given: Named
) -> list[tuple[_Term, float]]:
    """Returns the terms with the factors with which they give an array; empty if they do not."""
    names = [*given]
    own = [t for t in terms if any(np.any(t.gradients[n]) for n in names if n in t.gradients)]
    solved, known = solve(given, [t.gradients for t in own], names)
    if not known.all() or not np.isfinite(solved).all():
        return []
    factors = solved / share
    for value in (0.0, 1.0):
        factors[np.abs(factors - value) < _CLOSE] = value
    expression = [(share * float(f), t.gradients) for f, t in zip(factors, own, strict=True)]
    is_right = pair.tolerance.fits(given, expression, names)
    return [*zip(own, factors.tolist(), strict=True)] if is_right else []


def _limit_of_values(pair: StepPair, terms: Sequence[_Term], share: float, given: Named) -> float:
    """Returns the limit to which the values of each pass are clipped before the sum; 0 if none."""
    names, limit = [*given], 0.0
    stacks = {
        name: np.stack([dense(t.gradients.get(name, np.zeros_like(given[name]))) for t in terms])
        for name in names
    }
    # The element that loses most tells the limit, if its terms do not cancel.
    lost = 0.0
    for name, stack in stacks.items():
        sizes, size = np.abs(stack), np.abs(given[name]) / share
        are_alike = np.abs(stack.sum(axis=0)) >= (1 - EPS) * sizes.sum(axis=0)
        gaps = np.where(are_alike, sizes.sum(axis=0) - size, 0.0)
        place = int(np.argmax(gaps))
        if gaps.flat[place] > lost:
            lost, left = gaps.flat[place], float(size.flat[place])
            each = np.sort(sizes.reshape(len(sizes), -1)[:, place])
            limits = [(left - each[:n].sum()) / (len(each) - n) for n in range(len(each))]
            limit = next((x for x, y in zip(limits, each, strict=True) if x <= y), 0.0)
    clipped = {name: np.clip(stack, -limit, limit).sum(axis=0) for name, stack in stacks.items()}
    is_right = limit > 0 and pair.tolerance.fits(given, [(share, clipped)], names)
    return limit if is_right else 0.0


def _meaning(pair: StepPair, terms: Sequence[_Term], factors: np.ndarray, copy: int) -> Why | None:
    """Returns what the factors of passes mean; None if each shard has one for all its passes."""
    shards, numbers = (np.array([term[k] for term in terms]) for k in (0, 1))
    num = 1 + int(max(numbers))
    if all(_are_equal(factors[shards == shard]) for shard in {*shards.tolist()}):
        return None
    of_number = [factors[numbers == number] for number in range(num)]
    passes = f"of the {num} backward passes of a step"
    if all(map(_are_equal, of_number)):
        return _of_all_shards(pair, terms, [own[0] if len(own) else 1.0 for own in of_number])
    mine = np.isin(shards, pair.second.trace.shards_of(copy))
    if not np.any(factors[~mine]):
        return None
    alone = [
        n
        for n in range(num)
        if np.any(factors[mine & (numbers == n)]) and not np.any(factors[~mine & (numbers == n)])
    ]
    if alone and all(_are_equal(of_number[n]) for n in range(num) if n not in alone):
        text = f"{passes}, each replica adds its own gradients of {_listed(alone)}, which are not"
        return "all-reduce", "not_all_reduced", f"{text} all-reduced"
    lost = [term for term, factor in zip(terms, factors, strict=True) if not factor]
    if lost and _are_equal(factors[factors != 0]):
        names = (f"{t.number} of {pair.second.trace.name_of('raw', t.shard)}" for t in lost)
        text = f"{passes}, the gradients of number {', '.join(names)} are lost"
        return "gradients", "lost_micro_batch", text
    step = pair.second
    # Those by the checked recording's names, some of which the reference may lack: clipping has the
    # norm of all.
    kept = [step.trace.backward_passes(step.position, shard) for shard in step.shards]
    norms = [total_norm(kept[term.shard][term.number]) for term in terms]
    if why := _clipped(factors, norms) or _clipped_so_far(pair, terms, factors):
        return why
    text = f"{passes}, the gradients are multiplied by {_shown(factors)}"
    return "gradients", "scaled_gradient", text


def _of_all_shards(pair: StepPair, terms: Sequence[_Term], factors: Sequence[float]) -> Why:
    """Returns what the factors of passes mean that are those of all shards."""
    each, num = np.array(factors), len(factors)
    passes = f"of the {num} backward passes of a step"
    lost = np.flatnonzero(each == 0)
    if len(lost) and _are_equal(each[each != 0]):
        return "gradients", "lost_micro_batch", f"{passes}, those of {_listed(lost)} are lost"
    if np.all(np.abs(each - np.round(each)) < _CLOSE) and min(np.round(each)) >= 1:
        text = f"{passes}, the gradients are added {_shown(each)} times"
        return "gradients", "repeated_gradient", text
    if scale := _divided_again(pair, each):
        text = f"{passes}, the gradients are divided by {scale:g}, the loss scale, after each"
        return "gradients", "unscaled_between_micro_batches", f"{text}: those so far again"
    text = f"{passes}, the gradients are multiplied by {_shown(each)}"
    sums = _by_number(terms)
    own, norms = each[[t.number for t in sums]], [pair.gradients.norm_of(t.gradients) for t in sums]
    why = _clipped(own, norms) or _clipped_so_far(pair, sums, own)
    return why or ("gradients", "scaled_gradient", text)


def _divided_again(pair: StepPair, factors: np.ndarray) -> float:
    """Returns the loss scale by which each pass divides what those before it gave; 0 if none."""
    scales = pair.gradients.divisor, pair.second.trace.loss_scale(pair.second.position, 0)
    times = np.arange(len(factors))[::-1]
    fitting = (s for s in scales if s != 1 and np.allclose(factors * s**times, 1, rtol=_CLOSE))
    return next(fitting, 0.0)


def _clipped(factors: np.ndarray, norms: Sequence[float]) -> Why | None:
    """Returns a sentence if what has a factor below 1 is clipped to one norm."""
    is_clipped = (factors > 0) & (factors < 1)
    left = (factors * norms)[is_clipped]
    # One factor may be any number.
    if _are_equal(factors[is_clipped]) or not _are_equal(left) or not np.all(left):
        return None
    if not np.all(is_clipped | (factors == 1)):
        return None
    text = f"the gradients of each backward pass are clipped to a norm of {left[0]:.4g}"
    return "gradients", "clipped_in_each_micro_batch", f"{text}, not only their sum"


def _clipped_so_far(pair: StepPair, terms: Sequence[_Term], factors: np.ndarray) -> Why | None:
    """Returns a sentence if what a shard has added so far is clipped to one norm after each pass.

    The gradient of a pass has the factors of all clippings after it.
    """
    norms = list[float]()
    for shard in dict.fromkeys(term.shard for term in terms):
        own = [(t, f) for t, f in zip(terms, factors, strict=True) if t.shard == shard]
        for number, ((_, factor), (_, later)) in enumerate(itertools.pairwise(own), 1):
            if 0 < factor < (1 - _CLOSE) * later:
                scaled = [t._replace(gradients=scaled_all(t.gradients, f)) for t, f in own[:number]]
                names = [*dict.fromkeys(name for t in scaled for name in t.gradients)]
                norms.append(pair.gradients.norm_of(_sum_of(scaled, names)) / later)
    if len(norms) < 2 or not _are_equal(np.array(norms)):  # One factor may be any number.
        return None
    text = f"what is added so far is clipped to a norm of {norms[0]:.4g} after each backward pass"
    return "gradients", "clipped_in_each_micro_batch", f"{text}, not only the sum of all"


def _are_equal(numbers: np.ndarray) -> bool:
    return not len(numbers) or bool(np.ptp(numbers) <= _CLOSE * np.max(np.abs(numbers)))


def _shown(factors: Sequence[float] | np.ndarray) -> str:
    return ", ".join(f"{factor:.4g}" for factor in factors)


def _listed(numbers: Sequence[int] | np.ndarray) -> str:
    return f"number{'s' if len(numbers) > 1 else ''} {', '.join(str(n) for n in numbers)}"


# --- In state ------------------------------------------------------------------------------------


def backward_passes_in_state(
    pair: StepPair, weights: Mapping[str, str], states: Sequence[Named]
) -> Why | None:
    """Explains state by passes, of which a script keeps no sum where it is recorded.

    In the reference, it is X' = β · X + c · gradient, or c · gradient², of the sum of all passes.

    Args:
        pair: the step.
        weights: name of a state → the reference's name of its weight.
        states: the state before the step, and after it in both recordings.
    """
    wanted = {*weights.values()}
    terms = [
        t._replace(gradients={name: t.gradients.get(of, 0.0) for name, of in weights.items()})
        for t in _terms(pair.gradients, [*wanted])
    ]
    passes = pair.gradients.reference_backward_passes
    if not terms or {name for own in passes for name in own} < wanted:
        return None
    old, first, second = states
    total = {n: np.sum([p[of] for p in passes if of in p], axis=0) for n, of in weights.items()}
    each = _by_number(terms)
    share = float(solve(total, [_sum_of(each, [*weights])])[0][0])
    if not _are_near(total, share, each, np.ones(len(each))):
        return None
    for how in recurrences(old, first, total):
        used = {name: how.used(old[name], second[name]) for name in weights}
        for factors in _patterns(used, share, each, how.power):
            if _are_near(used, share, each, factors, how.power):
                return _of_all_shards(pair, terms, factors.tolist())
    return None


def _by_number(terms: Sequence[_Term]) -> list[_Term]:
    """Returns the sum over the shards of each pass."""
    numbers = sorted({term.number for term in terms})
    of_number = [[t for t in terms if t.number == number] for number in numbers]
    return [_Term(0, own[0].number, _sum_of(own, [*own[0].gradients])) for own in of_number]


def _patterns(
    used: Named, share: float, terms: Sequence[_Term], power: int
) -> Iterator[np.ndarray]:
    """Yields factors of passes that are not 1: solved ones, or those of usual mistakes."""
    num = len(terms)
    if power == 1:
        solved, known = solve(used, [term.gradients for term in terms])
        if known.all() and np.ptp(solved) > _CLOSE * share:
            factors = solved / share
            factors[np.abs(factors) < _CLOSE] = 0
            yield factors
        return
    for place in range(num):  # A square does not tell the signs.
        yield 1.0 * (np.arange(num) == num - 1 - place)
        yield 1.0 * (np.arange(num) != place)
    yield np.arange(num, 0.0, -1)  # What is sent is not cleared.


def _are_near(
    value: Named, share: float, terms: Sequence[_Term], factors: np.ndarray, power: int = 1
) -> bool:
    sums = {
        name: np.sum([f * t.gradients[name] for f, t in zip(factors, terms, strict=True)], axis=0)
        for name in value
    }
    right = {name: (share * total) ** power for name, total in sums.items()}
    return not any(is_far(value[name], right[name], _CLOSE) for name in value)


# --- What the passes themselves give -------------------------------------------------------------


def rows_of_backward_passes(pair: StepPair, wrong: Sequence[str]) -> Iterator[Row]:
    """Yields the row of passes that count equally, and should not: as means of other numbers."""
    terms, given = _terms(pair.gradients, wrong), pair.gradients.given[0]
    if not terms:
        return
    right = {name: pair.gradients.reference[name] for name in wrong}
    factor, _ = solve(given, [_sum_of(terms, wrong)], wrong)
    solved, known = solve(right, [term.gradients for term in terms])
    share = float(factor[0])
    total = [(share, term.gradients) for term in terms]
    if not (known.all() and share > 0 and min(solved) > 0):
        return
    times, shards = solved / share, np.array([term.shard for term in terms])
    of_shards = [times[shards == shard] for shard in {*shards.tolist()}]
    is_known = bool(pair.gradients.raw) and all(map(_are_equal, of_shards))  # By other rows.
    if is_known or _are_equal(times) or abs(np.mean(times) - 1) > _CLOSE:
        return
    if pair.tolerance.fits({name: given[name] for name in wrong}, total, wrong):
        text = (
            f"the backward passes of a step count equally; counted {_shown(times)} times, as with"
            " other numbers of tokens, their gradients give that of the whole batch"
        )
        expression = [(float(f), t.gradients) for f, t in zip(solved, terms, strict=True)]
        yield Row("mean_of_means", text, expression)
