"""Raw and sum: one judgement with two formulas.

What a copy got is a sum of what the ranks computed, given = Σ a·g, and so is the reference,
reference = Σ b·g. Where all ranks count equally in both, and a/b is a number of ranks, or where the
ranks count unequally in what a copy got, the sum is wrong; where the reference is no such sum, or
one of unequal ranks, what they computed is: of their loss, or of its gradient.

A sum is wrong in these places, in their order:

- `_missing`: what ranks computed does not arrive.
- `_node_of`: of ranks, of passes or of the step before, some count otherwise than others;
  `_node_of_factor`: all count alike, with a factor between a sum and a mean, or another one than
  the framework's; `_node_of_some`: such a factor of few weights, or of later ones.
- `_by_operator`: the sum, or each of its terms, is rounded to 16 bits.
- `_in_parts`: the reference is the sum or mean of what copies got; a rank's part has a factor; or
  what ranks computed adds up to the reference.
- `hidden_in_sum`: what a right update does not show.
- In `nodes`: `hidden_factor` behind clipping, and `_of_unrecorded` without recorded gradients.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from lockstep.engine import bounds
from lockstep.engine.averages import read_used
from lockstep.engine.bounds import Bound
from lockstep.engine.look import Finding, Look, factors_of_parts, where
from lockstep.engine.pair import Pair, common_factor, copies_are_equal, norm_of
from lockstep.engine.random import REPEATED, has_keys
from lockstep.engine.solve import (
    CLOSE,
    Formula,
    Term,
    clipped,
    formulas,
    is_constant,
    is_one_of,
    short_dtypes,
)
from lockstep.engine.verdict import CLIPPING, GRADIENT, LOSS, RANDOM, SUM, UPDATE
from lockstep.numeric.arrays import (
    EPS,
    UNITS,
    Named,
    computed,
    dense,
    distance,
    norm,
    same_bits,
    scaled_all,
    unit_of,
)

# What is read off state has the rounding of the state, of some ten steps of its size.
OF_READ = 1024
# What a script changes by hand, or clips, is rounded once more.
BY_HAND = 256
# A gradient that is read off state is another one than the recorded if it differs by this.
OTHER = 1e-4
# Copies are unlike if they differ by more than the rounding of a reduction in another order.
UNLIKE = 1e-5
# Part of a gradient that an optimizer which reduces by itself would have to change.
REFUTED = 0.01


class Asked(NamedTuple):
    """What copies got, the reference's, and which of it is wrong.

    Attributes:
        given: the gradients of each copy.
        right: those of the reference.
        names: the wrong ones.
        ranks: the copies with a wrong one.
        seen: evidence for names.
    """

    given: Sequence[Named]
    right: Named
    names: Sequence[str]
    ranks: Sequence[int]
    seen: dict[str, Any]

    def finding(
        self, node: str, given: Sequence[Formula] = (), right: Sequence[Formula] = (), **seen: Any
    ) -> Finding:
        """Returns the finding that these are wrong at a node."""
        all_seen = {**self.seen, **seen}
        return Finding(node, (*self.names,), (*self.ranks,), (*given,), (*right,), all_seen)


def gradients(look: Look) -> Finding | None:
    """Judges what the copies got, and says whether ranks computed or summed it wrongly."""
    asked = _asked(look)
    if asked is None:
        return None
    if finding := _changed_by_hand(look, asked) or _missing(look, asked):
        return finding
    is_read = any(
        distance(own[name], got[name])
        for own, got in zip(asked.given, look.pair.sums, strict=True)
        for name in asked.names
    )
    times = OF_READ if is_read else bounds.OF_REDUCTION
    found = _by_terms(look, asked, times) or _in_parts(look, asked)
    # States of generators are no evidence here: ranks may rightly have equal or unlike ones.
    keys = has_keys(look.pair.training)
    draws_unlike = any(keys or x.how == REPEATED for x in look.random)
    is_unknown = found.seen.get("unknown") and found.node in (LOSS, GRADIENT)
    if is_unknown and draws_unlike and not look.pair.has_same_shards:
        return dataclasses.replace(found, node=RANDOM)
    return found


def _by_terms(look: Look, asked: Asked, times: float) -> Finding | None:
    """Returns the formulas that fit what copies got, and better the reference's as well."""
    first: Finding | None = None
    for terms, bound in _sets_of_terms(look, asked.right, bounds.of_sums(look.pair, times)):
        found, left = _of_copies(asked, terms, bound)
        if not found or left:
            continue
        usual = [[1.0] * len(terms), [1 / len(terms)] * len(terms)]
        right, unknown = formulas(asked.right, asked.names, terms, look.solved, usual)
        node = _node_of(look, asked, found, right, unknown)
        finding = asked.finding(node, found, right)
        if not unknown:
            return finding
        finding = dataclasses.replace(finding, seen={**finding.seen, "unknown": True})
        first = first or finding
    return _by_operator(look, asked) or first


def _asked(look: Look) -> Asked | None:
    """Returns the wrong gradients, with respect to the claim; None if all are right."""
    pair = look.pair
    names = [n for n in pair.names if any(n in wrong for wrong in look.wrong_sums.values())]
    given = _given(pair, names)
    names = [
        n for n in names if any(look.wrong({n: own[n]}, {n: pair.right_sum[n]}) for own in given)
    ]
    names = _not_refuted(look, names)
    if not names:
        return None
    right = pair.right_sum
    ranks = [
        copy for copy, own in enumerate(given)
        if any(n in look.wrong_sums.get(copy, ()) or not np.array_equal(own[n], pair.sums[copy][n])
               for n in names)
    ]  # fmt: skip
    is_finite = [all(np.isfinite(own[n]).all() for own in given) for n in names]
    seen = {
        "apart": [n for n in names if not copies_are_equal(given, n)],
        "not_finite": [n for n, known in zip(names, is_finite, strict=True) if not known],
        "all": _are_all(names, right),
    }
    return Asked(given, right, names, ranks, seen)


def _are_all(names: Sequence[str], right: Named) -> bool:
    """Returns whether gradients are all but those of rounding."""
    largest = max(map(norm, right.values()), default=0.0)
    return all(name in names or norm(own) <= OTHER * largest for name, own in right.items())


def _given(pair: Pair, names: Sequence[str]) -> list[Named]:
    """Returns what each copy got, or what its optimizer used, where its state shows it."""
    found = []
    for own, read in zip(pair.sums, read_used(pair, names), strict=True):
        others = {}
        for name, gradient in read.items():
            rule, least = pair.rule(name), OTHER * max(norm(own[name]), norm(pair.right_sum[name]))
            if rule is not None and rule.learning_rate:  # A weight has lost what is less.
                least = max(least, EPS * norm(pair.weights[name]) / abs(rule.learning_rate))
            if norm(gradient) > least and distance(gradient, own[name]) > least:
                others[name] = gradient
        found.append({**own, **others})
    return found


def _not_refuted(look: Look, names: Sequence[str]) -> list[str]:
    """Returns the gradients that S' does not refute.

    Where a weight and its state agree on all copies, its gradient was right. If copies got unlike
    gradients of it, the optimizer reduces by itself: then only what its state shows of the others
    counts.
    """
    pair = look.pair
    if not look.claim.is_known or pair.clips:
        return [*names]
    wrong = [x for x in look.claim.changes if x.share is None] + look.claim.wrong
    differing = {name for x in wrong for name in (x.variable.weight, x.variable.first)}
    differing |= {*look.unrefuted}
    if look.claim.holds:  # A step of the learning rate 0 shows no gradient.
        differing |= {n for n in names if not _is_shown(pair, n)}
    agreeing, left = [n for n in names if n not in differing], [n for n in names if n in differing]
    is_inside = any(
        not copies_are_equal(pair.sums, n)
        and any(
            distance(own[n], pair.right_sum[n]) > REFUTED * norm(pair.right_sum[n])
            for own in pair.sums
        )
        for n in agreeing
    )
    read = {
        n for own in read_used(pair, left) for n, gradient in own.items()
        if norm(gradient) > OTHER * norm(pair.right_sum[n])
    }  # fmt: skip
    return [n for n in left if n in read] if is_inside else left


def _is_shown(pair: Pair, name: str) -> bool:
    """Returns whether a step changes a weight of the reference, or its state."""
    states = [pair.state(v) for v in pair.variables if name in (v.first, v.weight)]
    return not all(same_bits(*state) for state in states if state)


# --- What changes by hand, and what is missing ----------------------------------------------------


def _changed_by_hand(look: Look, asked: Asked) -> Finding | None:
    """Judges what a script does with a right sum before the optimizer, as clipping it by hand."""
    pair = look.pair
    changes = bool(pair.right_received) and abs(pair.hand_factor - 1) > OTHER
    factors = _factors_received(look)
    if is_one_of(factors, [1.0]) or (changes and is_one_of(factors, _usual_factors(look))):
        given = [
            formula._replace(copies=(copy,))
            for copy in asked.ranks
            for formula in formulas(
                asked.given[copy], asked.names, [Term("s", "received", copy, pair.received[copy])],
                bounds.of_rounding(EPS, BY_HAND),
            )[0]
        ]  # fmt: skip
        given = given or _of_parts(look, asked)
    elif changes and not pair.received:
        terms, bound = next(_sets_of_terms(look, asked.right, bounds.of_sums(pair)))
        given, left = _of_copies(asked, terms, bound)
        right, unknown = formulas(asked.right, asked.names, terms, look.solved)
        if left or unknown or not all(f.is_even for f in (*given, *right)):
            return None
    else:
        return None
    wrong = [asked.given[copy] for copy in asked.ranks]
    ratios = _multiples(look, wrong, asked.names, asked.right)
    if len(ratios) and is_one_of(ratios, [n for n in _usual_factors(look) if n != 1]):
        return None  # A sum in place of a mean, or the other way round.
    return asked.finding(CLIPPING, given, factor=pair.hand_factor)


def _factors_received(look: Look) -> np.ndarray:
    """Returns the factors of what copies received over the reference's; empty if there are none.

    Only where a script changes it by hand: else it is what is asked for.
    """
    pair = look.pair
    right = pair.right_received or pair.right_sum
    is_changed = any(
        not np.array_equal(own[n], got[n])
        for own, got in zip(pair.sums, pair.received, strict=False)
        for n in pair.names
    )
    if pair.right_received and abs(pair.hand_factor - 1) > OTHER:
        is_changed |= not look.wrong(scaled_all(pair.right_received, pair.hand_factor))
    names = [n for n in pair.names if norm(right[n])] if is_changed else []
    return _multiples(look, pair.received if names else [], names, right)


def _multiples(
    look: Look, given: Sequence[Named], names: Sequence[str], right: Named
) -> np.ndarray:
    """Returns the factors of gradients over the reference's; empty if they are no multiples."""
    found, term = list[float](), Term("G", "right", -1, right)
    for own in given:
        more, left = formulas(own, names, [term], look.solved)
        if left:
            return np.zeros(0)
        found += [f.factors[0] for f in more]
    return np.array(found)


def _usual_factors(look: Look) -> list[float]:
    """Returns the factors between a sum and a mean."""
    return [1.0, *map(float, look.numbers), *(1 / n for n in look.numbers)]


def _missing(look: Look, asked: Asked) -> Finding | None:
    """Finds gradients that are 0 on all copies, or in the reference alone."""
    pair, seen = look.pair, asked.seen
    zero = [n for n in asked.names if not any(norm(own[n]) for own in asked.given)]
    only = [n for n in asked.names if not norm(asked.right[n])]
    if not (zero or (only and len(only) == len(asked.names))):
        return None
    is_lost = zero and pair.raw and all(any(norm(own[n]) for own in pair.raw) for n in zero)
    node, names = SUM if is_lost else GRADIENT, zero or only
    return Finding(node, (*names,), (*asked.ranks,), (), (), {**seen, "zero": zero, "only": only})


# --- Formulas -------------------------------------------------------------------------------------


def _sets_of_terms(look: Look, right: Named, sums: Bound) -> Iterator[tuple[list[Term], Bound]]:
    """Yields the terms of which a sum may consist, fewer first, with the bound of their sums."""
    pair, whole = look.pair, [Term("G", "right", -1, right)]
    own = [Term(f"g{r}", "gradient", r, g) for r, g in enumerate(pair.raw)]
    base, bound = (own, sums) if own else (whole, look.solved)
    yield base, bound
    earlier = pair.previous
    if earlier and earlier.raw and own:
        of_earlier = [
            Term(f"g{r}[t−1]", "gradient", r, g, offset=-1) for r, g in enumerate(earlier.raw)
        ]
        yield own + of_earlier, sums
    elif earlier and earlier.names and not own:
        yield [*whole, Term("G[t−1]", "right", -1, earlier.right_sum, offset=-1)], bound
    if passes := [(r, p, g) for r, each in enumerate(pair.passes) for p, g in enumerate(each)]:
        yield [Term(f"g{r}.{p}", "pass", r, g) for r, p, g in passes], sums
    for label, kind, value in (("W", "weight", np.asarray), ("sign(W)", "sign", np.sign)):
        yield [*base, Term(label, kind, -1, {n: value(w) for n, w in pair.weights.items()})], bound


def _of_copies(
    asked: Asked, terms: Sequence[Term], bound: Bound
) -> tuple[list[Formula], list[str]]:
    """Returns the formulas of what copies got; equal ones of several copies are one."""
    found, missing = dict[tuple, Formula](), set[str]()
    for copy in asked.ranks:
        own, left = formulas(asked.given[copy], asked.names, terms, bound, _usual(terms, copy))
        missing |= {*left}
        for each in own:
            key = each.names, tuple(round(f, 5) for f in each.factors)
            copies = (*found[key].copies, copy) if key in found else (copy,)
            found[key] = each._replace(copies=copies)
    return [*found.values()], sorted(missing)


def _usual(terms: Sequence[Term], copy: int) -> list[list[float]]:
    """Returns usual factors of what ranks computed: a sum, a mean, the own one, one rank's."""
    num = len(terms)
    if any(term.kind != "gradient" or term.offset for term in terms):
        return []
    units = np.eye(num).tolist()
    own = [units[copy], [x / num for x in units[copy]]] if copy < num else []
    return [[1.0] * num, [1 / num] * num, *own, *units]


def _node_of(
    look: Look, asked: Asked, found: Sequence[Formula], right: Sequence[Formula],
    unknown: Sequence[str],
) -> str:  # fmt: skip
    """Returns whether the loss, its gradient, the sum, or what is added after it is wrong."""
    if any(term.offset for term in found[0].terms):
        # What is added to a whole gradient was not cleared; what replaces it came too early.
        is_stale = any(f.has_earlier and not np.all(f.shares) for f in found)
        return SUM if is_stale else GRADIENT
    if any(term.is_weight for term in found[0].terms):
        is_added = any(np.any(f.of("weight", "sign")) for f in found)
        is_computed = any(np.any(f.of("weight", "sign")) for f in right)
        return UPDATE if is_added and not is_computed else computed_wrongly(look)
    if found[0].terms[0].kind == "pass":
        are_alike = len({f.factors for f in found}) == len({f.names for f in found})
        return GRADIENT if are_alike else SUM
    if _are_clipped(look, found):
        asked.seen["is_clipped"] = True
        return GRADIENT
    even = [f for f in found if f.is_even]
    if any({*f.names} & {*unknown} for f in even):
        return computed_wrongly(look)
    if len(even) < len(found):
        return SUM
    if not all(f.is_even for f in right):
        return LOSS if len(found) == 1 and asked.seen["all"] else computed_wrongly(look)
    return _node_of_factor(look, asked, found, right)


def _are_clipped(look: Look, found: Sequence[Formula]) -> bool:
    """Returns whether all copies add what ranks computed as if each were clipped to one norm.

    That is the norm of all gradients, or of each.
    """
    for formula in found:
        shares = formula.shares
        norms = [norm_of({n: own[n] for n in formula.names}) for own in look.pair.raw]
        if not len(shares) == len(norms) > 1 or formula.is_even or not np.all(shares > 0):
            return False
        if not is_constant(shares * np.array(norms)):
            return False
    return True


def _node_of_factor(
    look: Look, asked: Asked, found: Sequence[Formula], right: Sequence[Formula]
) -> str:
    """Returns the node of factors that all ranks have: the loss, its gradient, or the sum."""
    pair, shares = look.pair, found[0].shares
    share, is_one = pair.framework_share, len(found) == 1 and asked.seen["all"]
    if len(pair.raw) > 1 and all(_are_alike(own, pair.raw[0], asked.names) for own in pair.raw):
        return SUM  # What ranks hold before the reduction is a sum already.
    if (
        pair.raw
        and look.loss_agrees(shares)
        and (len(pair.shards) > 1 or not is_one_of(shares, [1]))
    ):
        return GRADIENT
    if pair.raw and share is not None:
        if not all(is_one_of(f.shares, [share]) for f in found):
            return SUM
        return LOSS if is_one else _node_of_some(look, asked)
    if not asked.seen["all"]:
        return _node_of_some(look, asked)
    numbers = _usual_factors(look)
    factor = np.array([look.loss_factor or 1.0])
    if is_one and not is_one_of(factor, [*numbers, *(look.num_passes * n for n in numbers)]):
        return LOSS
    right_of = {name: f for f in right for name in f.names}
    factors = [
        f.shares[0] / right_of[f.names[0]].shares[0] for f in found if f.names[0] in right_of
    ]
    if is_one_of(np.abs(factors), numbers):
        return SUM
    is_right = not pair.raw and look.loss_agrees() is True
    return LOSS if is_one and not is_right else GRADIENT


def _node_of_some(look: Look, asked: Asked) -> str:
    """Returns the node of a factor that some gradients have.

    A factor in the middle of a backward pass is in the gradients of all weights before it; one of
    few weights, or of later ones, as of experts or a head, is in their sum.
    """
    num = sum(bool(norm(own)) for own in look.pair.right_sum.values())
    # Trees of JAX are in alphabetical order.
    is_known = look.pair.training.trace.about.framework != "jax"
    is_before = _are_before(look, asked.names) if is_known else True
    return GRADIENT if is_before and len(asked.names) > num / 2 else SUM


def _are_before(look: Look, names: Sequence[str]) -> bool:
    """Returns whether weights of modules are all those before some place of the model.

    Weights that belong to no module are listed before all others.
    """
    known = [n for n, own in look.pair.right_sum.items() if norm(own) and ("." in n or "/" in n)]
    wrong = [name in names for name in known]
    return wrong == sorted(wrong, reverse=True)


def computed_wrongly(look: Look) -> str:
    """Returns whether what ranks computed is wrong in its loss, or in the gradient alone.

    A loss that is reduced with the framework's factor has to be the reference's.
    """
    share, num = look.pair.framework_share, len(look.pair.shards)
    shares = [share] * num if share is not None and num > 1 else ()
    return LOSS if look.loss_agrees(shares) is False else GRADIENT


def reduced_after_clipping(look: Look) -> Finding | None:
    """Judges what copies got where each rank clips what it sends."""
    pair, wrong = look.pair, dict[int, set[str]]()
    for copy, own in enumerate(pair.used):
        if far := bounds.wrong_gradients(own, pair.right_used, look.bound, pair):
            wrong[copy] = far
    names = [n for n in pair.names if any(n in own for own in wrong.values())]
    if not (names and pair.raw):
        return None
    apart = [n for n in names if not copies_are_equal(pair.used, n)]
    seen = {"apart": apart, "all": _are_all(names, pair.right_used)}
    asked = Asked(pair.used, pair.right_used, names, [*wrong], seen)
    return _by_terms(look, asked, BY_HAND)


def unused(look: Look) -> Finding | None:
    """Judges the gradients of a right update, which does not show them, as one that is skipped.

    Unlike gradients whose sum or mean is the reference's are reduced by the optimizer itself.
    """
    pair = look.pair
    far = [n for own in pair.used
           for n in bounds.wrong_gradients(own, pair.right_used, look.bound, pair)]  # fmt: skip
    total = {n: np.sum([own[n] for own in pair.used], axis=0) for n in far}
    mean = {n: own / len(pair.used) for n, own in total.items()}
    changed = pair.reference.trace.changes[pair.number]
    names = [
        n for n in pair.names
        if n in far and not bounds.cancels(pair, n)
        # A weight that changes rightly has used its gradient, whatever was added to it.
        and (n not in changed or not any(norm(own[n]) for own in pair.used))
    ]  # fmt: skip
    if not names:
        return None
    return _of_unused(look, names) if look.wrong(total) and look.wrong(mean) else None


def _of_unused(look: Look, names: Sequence[str]) -> Finding:
    zero = [n for n in names if not any(norm(own[n]) for own in look.pair.used)]
    seen = {"zero": zero, "unknown": True, "text": "gradients differ, and no update shows it"}
    return Finding(GRADIENT, (*names,), seen=seen)


def hidden_in_sum(look: Look) -> Finding | None:
    """Judges sums whose errors the bound of the gradients hides, as that of ties behind norms.

    What the ranks computed adds up to the reference's gradient, and what copies got is not this
    sum within its own rounding.
    """
    pair, share = look.pair, look.pair.framework_share
    given = pair.received or pair.sums
    if not (pair.names and pair.raw and share and len(pair.shards) > 1):
        return None
    whole = computed(pair.names, lambda n: share * np.sum([own[n] for own in pair.raw], axis=0))
    right, bound = pair.right_received or pair.right_sum, bounds.of_sums(pair, BY_HAND)
    expression = [(share, own) for own in pair.raw]
    shares = [bound(own, expression, pair.names) for own in given]
    ranks = [copy for copy, each in enumerate(shares) if not max(each.values()) <= 1]
    names = [n for n in pair.names if any(not each[n] <= 1 for each in shares)]
    if not names:
        return None  # A script may divide it afterwards.
    if far := [n for n in look.wrong(whole, right) if not bounds.cancels(pair, n)]:
        by = common_factor(given[0], whole)  # The script may divide otherwise than the framework.
        is_scaled = not look.wrong(scaled_all(whole, by), right)
        return None if is_scaled else _of_unused(look, far)
    if any(look.wrong(own, right) for own in given):
        return None  # What is not even near was not used.
    apart = [n for n in names if not copies_are_equal(given, n)]
    asked = Asked(given, whole, names, ranks, {"apart": apart, "all": _are_all(names, whole)})
    return _by_operator(look, asked) or asked.finding(SUM, unknown=True)


# --- Operators ------------------------------------------------------------------------------------


def _by_operator(look: Look, asked: Asked) -> Finding | None:
    """Tries sums that are rounded, or whose terms are rounded or clipped before they are added."""
    if finding := _rounded(look, asked):
        return finding
    pair, changed = look.pair, list[tuple[str, str, list[Named], Bound]]()
    for dtype, round_ in short_dtypes():
        own = [{n: round_(g[n]) for n in asked.names} for g in pair.raw]
        changed.append((SUM, f"each rounded to {dtype}", own, bounds.of_sums(pair)))
    calls = [*pair.reference.calls(0), *(c for s in pair.shards for c in pair.training.calls(s))]
    limits = [float(call.split()[-1]) for call in calls if call.startswith("clip norm")]
    limits += [norm_of(pair.right_used)] if pair.clip_factor < 1 - OTHER else []
    for limit in dict.fromkeys(limits) if len(pair.raw) > 1 else ():
        own = [clipped(g, limit) for g in pair.raw]
        if any(norm_of(g) > limit for g in pair.raw):
            bound = bounds.of_sums(pair, BY_HAND)
            changed.append((GRADIENT, f"each clipped to norm {limit:.4g}", own, bound))
    for node, operator, own, bound in changed if pair.raw else ():
        terms = [Term(f"g{r}", "gradient", r, g) for r, g in enumerate(own)]
        found, left = _of_copies(asked, terms, bound)
        if found and not left and all(is_one_of(f.shares, _usual_factors(look)) for f in found):
            return asked.finding(node, [f._replace(operator=operator) for f in found])
    return None


def _rounded(look: Look, asked: Asked) -> Finding | None:
    """Tries a sum that has only the digits of 16 bits, which its terms or the reference lack."""
    pair, own = look.pair, asked.given[asked.ranks[0]]
    for dtype, round_ in short_dtypes():
        is_short = [
            all(np.array_equal(round_(dense(each[n])), dense(each[n])) for n in asked.names)
            for each in (asked.right, own)
        ]
        if is_short != [False, True]:
            continue
        terms = [Term(f"g{r}", "gradient", r, g) for r, g in enumerate(pair.raw)]
        terms = terms or [Term("G", "right", -1, asked.right)]
        # Each rank, and each pass, may round what it adds.
        num = max(1, len(pair.shards)) * look.num_passes + 1
        found, left = _of_copies(asked, terms, bounds.of_rounding(UNITS[dtype], num))
        if found and not left:
            computed = [
                a for own in pair.training.named("raw") for a in own.values() if np.any(dense(a))
            ]
            of_terms = bool(pair.raw) and all(unit_of(array) > EPS for array in computed)
            found = [f._replace(operator=f"rounded to {dtype}") for f in found]
            return asked.finding(GRADIENT if of_terms else SUM, found)
    return None


# --- Parts ------------------------------------------------------------------------------------


def _in_parts(look: Look, asked: Asked) -> Finding:
    """Says in which copies and parts a gradient without a formula is wrong.

    Where copies got unlike gradients, the reference may be their sum or mean.
    """
    pair, of_copies = look.pair, list[Formula]()
    if asked.seen["apart"]:
        of_copies = _right_of_copies(look, asked)
    parts = [f for f in _of_parts(look, asked) if abs(f.factors[0] - 1) > CLOSE]
    copy, name = asked.ranks[0], asked.names[0]
    place = where(asked.given[copy][name], asked.right[name])
    changes = bool(pair.right_received) and abs(pair.hand_factor - 1) > OTHER
    if any(f.is_even or not f.shares.all() for f in of_copies):
        # What ranks of a model pass on is wrong in all weights before it.
        num_modules = len({name.rpartition(".")[0] for name in asked.names})
        is_passed = num_modules > 1 and not (asked.seen["all"] or is_along_data(pair, of_copies))
        node = GRADIENT if is_passed and _are_before(look, asked.names) else SUM
    elif parts and changes:
        node = CLIPPING
    elif parts:
        is_sum = asked.seen["all"] or not is_constant(np.array([f.factors[0] for f in parts]))
        node = SUM if is_sum else _node_of_some(look, asked)
    elif _is_computed_rightly(look):
        node = SUM
    else:
        node = computed_wrongly(look)
    return asked.finding(
        node, parts, of_copies=of_copies, where=place, unknown=not (parts or of_copies),
    )  # fmt: skip


def _is_computed_rightly(look: Look) -> bool:
    """Returns whether what the ranks computed adds up to what the reference computed."""
    pair = look.pair
    terms = [Term(f"g{r}", "gradient", r, g) for r, g in enumerate(pair.raw)]
    if not (terms and pair.right_received):
        return False
    names = [n for n in pair.names if norm(pair.right_received[n])]
    found, left = formulas(pair.right_received, names, terms, look.solved)
    return not left and all(f.is_even and np.any(f.shares) for f in found)


def is_along_data(pair: Pair, of_copies: Sequence[Formula]) -> bool:
    """Returns whether copies with unlike gradients differ along axes of data only."""
    mesh = pair.training.trace.mesh
    if not (mesh and mesh.model_axes):
        return True
    places = [mesh.coordinates(t.rank) for formula in of_copies for t in formula.terms]
    return all(len({place[axis] for place in places}) == 1 for axis in mesh.model_axes)


def _right_of_copies(look: Look, asked: Asked) -> list[Formula]:
    """Returns the reference as a sum of what unlike copies got."""
    names = asked.seen["apart"]
    unlike = [
        copy for copy, own in enumerate(asked.given)
        if not any(_are_alike(own, asked.given[before], names) for before in range(copy))
    ]  # fmt: skip
    terms = [Term(f"s{copy}", "copy", copy, asked.given[copy]) for copy in unlike]
    return formulas(asked.right, names, terms, look.solved)[0]


def _are_alike(first: Named, second: Named, names: Sequence[str]) -> bool:
    return all(distance(first[n], second[n]) <= UNLIKE * norm(second[n]) for n in names)


def _of_parts(look: Look, asked: Asked) -> list[Formula]:
    """Returns the factors of the parts of wrong gradients that ranks hold, where they have some."""
    right = {name: asked.right[name] for name in asked.names}
    found = factors_of_parts(look.pair, asked.given, Term("G", "right", -1, right))
    return [formula for formula in found if formula.names]
