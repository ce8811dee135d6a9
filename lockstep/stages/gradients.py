"""The node `raw`: what the shards send adds up to the gradient of the whole batch in the reference.

It is judged together with the sum, by two solved expressions: reference = Σ b · raw, and
given = Σ a · raw. a / b is what is wrong with the sum and b with the loss, whatever a script calls
a sum or a mean: a script may divide by hand, before or after it adds.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.answer.text import count
from lockstep.answer.verdict import BY_DESIGN, FAULT, NOT_COMPARED, Finding
from lockstep.explain.axes import clipped_by_hand, not_reduced, reduced_over_parts
from lockstep.explain.backward_passes import sums_of_backward_passes
from lockstep.explain.decays import other_decay
from lockstep.explain.drawn import noise_in_gradients
from lockstep.explain.factors import meanings
from lockstep.explain.given_rows import given_rows
from lockstep.explain.layers import reordered_rows
from lockstep.explain.own_weights import own_weights, reduces_otherwise
from lockstep.explain.raw_rows import decays_equally, raw_rows
from lockstep.explain.rows import choose, explained_apart
from lockstep.explain.solve import solve
from lockstep.explain.tensors import why_part, why_tensor
from lockstep.explain.terms import Sums
from lockstep.explain.update_rows import recorded_norms
from lockstep.explain.used import Used, used_gradients
from lockstep.explain.variants import differ_by_layers, other_settings_of
from lockstep.numeric.arrays import (
    EPS,
    UNITS,
    Named,
    all_same_bits,
    dense,
    distance,
    is_far,
    norm,
    ratio,
    same_bits,
    total_norm,
    unit_of,
)
from lockstep.reference import StepPair
from lockstep.stages.clipping import (
    check_clipping,
    clipped_before_division,
    clipped_in_parts,
    clipped_values,
    compare_clipping,
    other_limits,
    summed_after_clipping,
)
from lockstep.stages.reduce import (
    applied_without_sum,
    check_all_reduce,
    check_sums,
    own_gradients,
    unequal_sums,
)
from lockstep.stages.rules import is_left_out
from lockstep.step import given_of

# Causes of a factor of what is sent, which the sum may take back.
FACTORS = (
    *("scaled_gradient", "sum_instead_of_mean", "mean_instead_of_sum", "other_loss_reduction"),
    *("micro_batches_not_averaged", "wrong_count", "loss_scale_left"),
)
_OF_ZEROS = "frozen", "sparsified"  # Causes of gradients that are 0 in part.
_TELLING = 16  # Elements that tell the dtype in which they were kept.
_NO_CLIPPING = 1e-6  # Relative; of the factor of a gradient that is not clipped.
_EPSILON_OF_CLIPPING = 1e-6  # PyTorch divides by the norm and this.
_CLOSE = 1e-4  # Relative; of solved factors.
_ROUNDED = 1e-6  # The same, of a factor that is known but for rounding.


def compare_gradients(pair: StepPair) -> Iterator[Finding]:
    """Compares the gradients of a step with the reference's, backwards from what is applied."""
    step = pair.second
    for stage in ("gradients", "all-reduce", "clipping"):
        step.mark_checked(stage)
    is_given, is_applied = pair.is_given_right, pair.is_applied_right
    if is_given:
        wrong = [*_sums_alone(pair)]
        yield from wrong
        if is_applied:
            yield from _rounded_apart(pair)
        elif step.clips_sum or not wrong:  # Else, what is applied is what the all-reduce leaves.
            yield from compare_clipping(pair)
    elif not is_applied and (noise := noise_in_gradients(pair)):
        stage, (cause, text, items) = noise
        yield step.found(stage, cause, text, items=items, tensors=pair.gradients.names)
    elif not is_applied and (why := clipped_before_division(pair)):
        yield step.found("clipping", *why, tensors=pair.different_gradients)
    elif not is_applied or _is_hidden(pair):
        of_passes = [
            step.found(*why, tensors=names) for why, names in sums_of_backward_passes(pair)
        ]
        if of_passes and all(each.detail != "scaled_gradient" for each in of_passes):
            yield from of_passes
            return
        first = [*summed_after_clipping(step)]
        yield from first
        found = [*_explained(pair, is_clipped_first=bool(first))]
        unknown = [f for f in found if f.detail in ("scaled_gradient", "unexplained")]
        if unknown and len(unknown) == len(found) and not first:
            if of_passes:
                yield from of_passes
                return
            if why := _in_16_bits(pair):
                yield step.found("all-reduce", *why, tensors=pair.different_gradients)
                return
            if why := clipped_by_hand(pair) or clipped_values(pair):
                yield step.found("clipping", *why)
                return
            if why := reduced_over_parts(pair, {n for f in unknown for n in f.tensors}):
                found = [step.found("all-reduce", *why)]
            if not step.trace.about.reduction and (rows := [*given_rows(pair)]):
                found = [step.found(*why, tensors=names) for why, names in rows]
        is_unknown = any(each.detail == "unexplained" for each in found)
        if is_unknown and not first and (rows := [*given_rows(pair)]):
            yield from (step.found(*why, tensors=names) for why, names in rows)
            return
        scaled = [each for each in found if each.detail == "scaled_gradient"]
        yield from (each for each in found if each not in scaled)
        if first:
            yield from scaled
        else:
            is_own = any(each.detail == "not_all_reduced" for each in found)
            clipped = [*check_clipping(step, has_own=is_own)]
            yield from () if _is_of_clipping(pair, clipped) else scaled
            yield from clipped
            if not clipped and any(each.stage == "gradients" for each in found):
                yield from other_limits(pair)
    # Else, what was kept is divided, or added, before the optimizer uses it.


def _in_16_bits(pair: StepPair) -> tuple[str, str] | None:
    """Explains gradients that have the digits of 16 bits, whatever the script adds them from."""
    step, terms = pair.second, pair.gradients
    wrong = [*pair.different_gradients]
    num = len(step.shards) * max(step.trace.micro_batches(step.position, s) for s in step.shards)
    second, first = (
        [np.float32(own[n]) for n in wrong] for own in (terms.given[0], terms.reference)
    )
    units = {unit_of(array) for array in second}
    names = [name for name, unit in UNITS.items() if {unit} == units]
    is_shown = sum(map(np.count_nonzero, second)) >= _TELLING and units != {unit_of(first[0])}
    if not (names and is_shown and max(units) > EPS):
        return None
    half = num * max(units) / 2  # Each addition rounds by half a unit.
    if any(distance(b, a) > half * norm(a) for a, b in zip(first, second, strict=True)):
        return None
    return "reduced_precision", f"{count('gradient', len(wrong))} are added or sent in {names[0]}"


def _is_of_clipping(pair: StepPair, clipped: Sequence[Finding]) -> bool:
    """Returns whether the first recording's gradients are clipped already, to the same norm.

    Its script has clipped them by hand, and the other one's optimizer clips those of each replica.
    """
    size = total_norm(pair.gradients.reference)
    return any(each.detail == "clipped_before_the_sum" for each in clipped) and any(
        abs(size - each) < _CLOSE * each for each in recorded_norms(pair.second, 0)
    )


def _sums_alone(pair: StepPair) -> Iterator[Finding]:
    """Checks sums of right gradients, which have the rounding of what was sent alone.

    The reference's gradient is known less exactly: an all-reduce in 16 bits may hide in its bound.
    """
    terms, step = pair.gradients, pair.second
    right = [(terms.share, raw) for raw in terms.raw]
    if not step.clips_sum:  # What is sent is clipped.
        yield from check_all_reduce(step)
        return
    is_known = len(right) > 1 and bool(step.trace.about.reduction)
    if is_known and pair.tolerance.fits(terms.reference, right):
        received = [_given_by_own_names(pair, copy) for copy in step.copies]
        yield from check_sums(_sums(pair, received, [terms.share] * len(right)))


def _rounded_apart(pair: StepPair) -> Iterator[Finding]:
    """Finds copies that add in different orders: their weights drift apart."""
    step = pair.second
    if step.has("sums") and step.trace.about.reduction and len(step.copies) > 1:
        yield from unequal_sums(step)


def divides_what_it_kept(pair: StepPair) -> bool:
    """Returns whether a right script divides gradients after it has kept what it sends."""
    step = pair.second
    if not (pair.is_given_right and step.has("sums") and pair.gradients.raw):
        return False
    share = [pair.gradients.share] * len(pair.gradients.raw)
    return not _are_right(Sums(step, step.named("sums"), share))


def _is_hidden(pair: StepPair) -> bool:
    """Returns whether clipping hides that the gradients that enter it are wrong.

    A script that clips by hand shows what it leaves, and what it sends. In JAX, a script says
    itself what it keeps: it may divide it later.
    """
    terms = pair.gradients
    factor, _ = terms.clipping
    if abs(factor - 1) <= _NO_CLIPPING:
        return False
    if clips_by_hand(pair):
        right = [(terms.share, raw) for raw in terms.raw]
        return bool(right) and not pair.tolerance.fits(terms.reference, right)
    if pair.second.trace.about.framework != "jax":
        return True
    own, other = pair.second.trace.about.num_replicas, pair.first.trace.about.num_replicas
    times = [_common_factor(pair, given) for given in terms.given]
    known = {own / other, other / own}
    return not all(time and min(abs(time - k) for k in known) > _CLOSE for time in times)


def clips_by_hand(pair: StepPair) -> bool:
    """Returns whether the reference clips, and no clipping of the other recording was seen."""
    step = pair.second
    calls = {call for copy in step.copies for call in step.trace.calls(step.position, copy)}
    is_seen = step.has("unclipped") or any(call.startswith("clip") for call in calls)
    is_kept = step.has("clipped") and not calls  # Of JAX, and of Keras.
    return pair.gradients.clipping[0] < 1 - _NO_CLIPPING and not (is_seen or is_kept)


def _common_factor(pair: StepPair, given: Named) -> float:
    """Returns the factor of all gradients that a copy is given; 0 if they do not have one."""
    reference = pair.gradients.reference
    factor, known = solve(given, [reference])
    times = float(factor[0])
    is_common = known.all() and pair.tolerance.fits(given, [(times, reference)])
    return times if is_common else 0.0


# --- What explains it ----------------------------------------------------------------------------


def _explained(pair: StepPair, *, is_clipped_first: bool) -> Iterator[Finding]:
    """Explains gradients that are not those of the reference, from what is sent onwards."""
    step, terms = pair.second, pair.gradients
    if not terms.raw:
        yield from _without_raw(pair)
        return
    share, num = _share(pair), len(terms.raw)
    of_all = {name: terms.given[0][name] / (share * num) for name in _whole(pair)}
    findings, factors = _sent(pair, [own | of_all for own in terms.raw], share)
    if is_clipped_first or not step.clips_sum:
        yield from findings
        yield from () if is_clipped_first else check_all_reduce(step)
        return
    received = [_given_by_own_names(pair, copy) for copy in step.copies]
    is_declared = step.trace.about.reduction and _are_right(_sums(pair, received, [share] * num))
    # The sum is as the wrapper makes it: what it was sent is wrong.
    is_of_sent = factors is None or is_declared
    right = [share] * num if factors is None else factors
    found = [*_of_sums(pair, received, right)]
    if is_declared:
        found = []
    elif any(each.detail == "unexplained" for each in found):
        # Ranks of one replica may have summands of what they are given.
        parts = [
            step.found("gradients", cause, text, tensors=names)
            for cause, text, names in not_reduced(pair)
        ]
        found = [each for each in found if not (parts and each.detail == "unexplained")] + parts
    found = _reduced_inside(pair, found, right)
    if not step.trace.about.reduction and any(f.status == NOT_COMPARED for f in findings):
        # Nothing says by which factor a script should add what random layers change.
        found = [each for each in found if each.detail not in FACTORS]
    kept = findings if is_of_sent or not found else [f for f in findings if f.detail not in FACTORS]
    yield from (*kept, *found)


def _share(pair: StepPair) -> float:
    """Returns the factor of what is sent in the sum: of a script that adds by hand, as seen.

    The gradients that are right tell it, if all copies are given the same ones.
    """
    step, terms = pair.second, pair.gradients
    if terms.divisor != 1 and not step.trace.about.reduction:
        divided = terms.share / terms.divisor
        sent = [(divided, own) for own in (*terms.raw, *filter(None, terms.removed))]
        if pair.tolerance.fits(terms.reference, sent):
            return divided
    left_out = {*pair.different_gradients, *_whole(pair)}
    right = [name for name in terms.names if name not in left_out]
    if step.trace.about.reduction or len(terms.raw) < 2 or not right or clips_by_hand(pair):
        return terms.share
    total = {n: np.sum([own[n] for own in terms.raw], axis=0) for n in right}
    factor, known = solve({n: terms.reference[n] for n in right}, [total])
    times = float(factor[0])
    is_known = bool(known.all()) and times > 0
    is_sum = is_known and pair.tolerance.fits(terms.reference, [(times, total)], right)
    for usual in (1.0, 1 / len(terms.raw)):
        times = usual if abs(times - usual) <= _ROUNDED * usual else times
    return times if is_sum else terms.share


def _reduced_inside(
    pair: StepPair, found: list[Finding], factors: Sequence[float]
) -> list[Finding]:
    """Replaces findings of gradients that are not reduced by what the optimizers have used.

    An optimizer may reduce gradients by itself: what it used is then the sum that is judged, as far
    as its state shows it.
    """
    step = pair.second
    own = [each for each in found if each.detail in ("not_all_reduced", "partly_all_reduced")]
    names = list(dict.fromkeys(name for each in own for name in each.tensors))
    used = used_gradients(pair, names) if names else None
    if names and used is None and (why := own_weights(pair)):
        cause, text, wrong = why
        step.reduced_inside.update(names)
        left = step.found("update", cause, text, kind="after", tensors=wrong)
        return [each for each in found if each not in own] + [left]
    if names and used is None and reduces_otherwise(pair):
        step.reduced_inside.update(names)
        text = "the optimizer reduces the gradients of the replicas itself, and no state shows how"
        left = step.found("all-reduce", "unexplained", text, tensors=names)
        return [each for each in found if each not in own] + [left]
    if used is None or not any(
        is_far(gradients[name], step.applied(copy).get(name, 0.0))
        for copy, gradients in enumerate(used.of_copies)
        for name in gradients
    ):
        return found  # What the optimizers were given is what they have used.
    step.reduced_inside.update(names)
    sums = dataclasses.replace(_sums(pair, used.of_copies, factors), slack=used.slack)
    more = [_of_elements(sums, each) or each for each in check_sums(sums)]
    if any(each.detail == "unexplained" for each in more) and (decay := _of_decay(pair, used)):
        more = [decay]
    return [each for each in found if each not in own] + more


def _of_decay(pair: StepPair, used: Used) -> Finding | None:
    """Explains gradients that optimizers use with another multiple of the weights in them."""
    terms, names = pair.gradients, {pair.in_second(name): name for name in pair.gradients.names}
    found = [
        other_decay(
            {
                name: (
                    terms.weights[names[name]], terms.reference_applied[names[name]],
                    gradients[name], used.slack[name],
                )
                for name in gradients
            },
            "the gradients that are used",
        )
        for gradients in used.of_copies
    ]  # fmt: skip
    if not found or not all(found) or found[0] is None:
        return None
    cause, text, wrong = found[0]
    return pair.second.found("update", cause, text, kind="after", tensors=wrong)


def _of_elements(sums: Sums, found: Finding) -> Finding | None:
    """Explains gradients that an optimizer reduces some elements of, as those that a rank owns."""
    if found.detail != "unexplained":
        return None
    own, all_of = 0, 0
    for name in found.tensors:
        terms = [f * dense(sent[name]) for f, sent in zip(sums.factors, sums.sent, strict=True)]
        bound, right = sums.bound(name, terms), np.sum(terms, axis=0)
        for copy, received in enumerate(sums.received):
            value = dense(received[name])
            mine = [dense(sums.sent[shard][name]) for shard in sums.context.trace.shards_of(copy)]
            is_right = np.abs(value - right) <= bound
            is_own = np.any([np.abs(value - each) <= bound for each in mine], axis=0) & ~is_right
            if not np.all(is_right | is_own):
                return None
            own, all_of = own + int(np.sum(is_own)), all_of + is_own.size
    text = f"{own} of {all_of} elements are those of the replica's own gradient, and not reduced"
    return dataclasses.replace(found, detail="partly_all_reduced", text=text)


def _without_raw(pair: StepPair) -> Iterator[Finding]:
    """Explains gradients of which only what the copies are given is known."""
    step, terms, known = pair.second, pair.gradients, list[str]()
    found = [*check_all_reduce(step)]
    yield from found
    known += [name for each in found for name in each.tensors]
    for cause, text, names in not_reduced(pair):
        known += names
        yield step.found("gradients", cause, text, tensors=names)
    if found and not step.trace.mesh:
        return
    if clips_by_hand(pair) and (why := clipped_in_parts(pair)):
        yield step.found("clipping", *why)
        return
    scale = 1.0
    if clips_by_hand(pair):  # What enters clipping is a multiple of what it leaves.
        factor, _ = terms.clipping
        scale = 1 / factor
    findings, _ = _sent(pair, [terms.given[0]], scale, known)
    yield from findings


def _of_sums(
    pair: StepPair, received: Sequence[Named], factors: Sequence[float]
) -> Iterator[Finding]:
    """Explains what the copies are given by what was sent; a script may clip it by hand."""
    step = pair.second
    if not clips_by_hand(pair):
        sent = step.named(step.kind_sent)
        own = applied_without_sum(step, sent) if step.has("sums") else []
        yield from own_gradients(step, own)
        whole = map(pair.in_second, _whole(pair))
        yield from check_sums(_sums(pair, received, factors), [*own, *whole])
        return
    clipped = _sums(pair, received, factors)
    if _are_right(clipped):
        return
    if why := clipped_in_parts(pair):
        yield step.found("clipping", *why)
        return
    plain = [*check_sums(dataclasses.replace(clipped, factors=factors, is_clipped=False))]
    is_known = not any(found.detail in ("scaled_gradient", "unexplained") for found in plain)
    yield from plain if is_known else check_sums(clipped)


def _whole(pair: StepPair) -> list[str]:
    """Returns the reference's names of gradients that the backward pass sums over ranks of a mesh.

    Of weights that are split over the axes of data, all ranks have what the copies are given.
    """
    terms = pair.gradients
    if not pair.second.trace.mesh or len(terms.raw) < 2:
        return []
    return [
        name
        for name, given in terms.given[0].items()
        if norm(given) and all(same_bits(own[name], given) for own in (*terms.raw, *terms.given))
    ]


def _sums(pair: StepPair, received: Sequence[Named], factors: Sequence[float]) -> Sums:
    """Returns the sums of what was sent, clipped as in the reference if a script does so itself."""
    if clips_by_hand(pair):
        terms = pair.gradients
        total = {
            name: np.sum([f * raw[name] for f, raw in zip(factors, terms.raw, strict=True)], axis=0)
            for name in terms.names
        }
        times = min(1.0, terms.clipping[1] / (terms.norm_of(total) + _EPSILON_OF_CLIPPING))
        factors = [factor * times for factor in factors]
    means = functools.partial(meanings, pair, of_sum=True)
    return Sums(pair.second, received, factors, means, clips_by_hand(pair))


def _given_by_own_names(pair: StepPair, copy: int) -> Named:
    own = given_of(pair.second, copy)
    names = {pair.in_second(name) for name in pair.gradients.names}
    return {name: gradient for name, gradient in own.items() if name in names}


def _are_right(sums: Sums) -> bool:
    first, *others = sums.received
    distinct = [first, *(own for own in others if not all_same_bits(own, first))]
    return all(
        share <= 1
        for received in distinct
        for share in sums.shares(received, sums.of(sums.factors)).values()
    )


def _sent(
    pair: StepPair, raw: Sequence[Named], share: float, known: Sequence[str] = ()
) -> tuple[list[Finding], Sequence[float] | None]:
    """Compares what is sent with the reference's gradient.

    Args:
        pair: the step.
        raw: what each shard sends.
        share: the factor with which it is added.
        known: weights with a finding already.

    Returns:
        Findings, and the factors with which what is sent gives the reference's gradient; None if
        they are unknown.
    """
    step, terms, right = pair.second, pair.gradients, [share] * len(raw)
    observed, as_sent = terms.reference, list(zip(right, raw, strict=True))
    shares = pair.tolerance.shares(observed, as_sent)
    wrong = [name for name, far in shares.items() if far > 1 and name not in known]
    if not wrong:
        return [], right
    # Where layers mix or draw per replica, a gradient may be 0 on a replica by chance.
    findings = [] if differ_by_layers(pair) else [*_without_gradient(pair, raw, wrong)]
    left = [n for n in wrong if not any(n in finding.tensors for finding in findings)]
    if any(f.status == FAULT and f.detail != "other_loss" for f in pair.found_in("loss")):
        return _measured(pair, other_settings_of(pair, wrong), wrong, raw, right), None
    factors: Sequence[float] | None = right
    if left:
        chosen, left = choose(observed, left, raw_rows(pair, raw, share), pair.tolerance, len(raw))
        for choice in chosen:
            row, text = choice.row, choice.row.text
            status = FAULT
            if row.detail == "regularisation_in_the_loss" and decays_equally(pair):
                status = BY_DESIGN
                text += ", and the optimizer of the other one decays the weights by as much"
            found = step.found(
                "gradients", row.detail, text, items=row.items, tensors=choice.names, status=status
            )
            findings.append(dataclasses.replace(found, may_be=(*found.may_be, *choice.may_be)))
        of_all = [c.row.factors for c in chosen if {*c.names} >= {*wrong} and c.row.factors]
        factors = of_all[0] if of_all else right
    if left:
        factors = None
        others = _reordered(pair, left) or _by_tensor(pair, raw, right, left)
        if others and all(each.detail in _OF_ZEROS for each in others):
            backward = other_settings_of(pair, left, others[0].text)
            others = backward if backward[0].detail == "other_backward" else others
        findings += others or other_settings_of(pair, left, _part_of(pair, raw, right, left))
    return _measured(pair, findings, wrong, raw, right), factors


def _measured(
    pair: StepPair, findings: Sequence[Finding], wrong: Sequence[str], raw: Sequence[Named],
    right: Sequence[float],
) -> list[Finding]:  # fmt: skip
    """Returns findings with the largest relative difference, and what rounding allows."""
    reference, apart = pair.gradients.reference, 0.0
    for name in wrong:
        total = np.sum([f * own[name] for f, own in zip(right, raw, strict=True)], axis=0)
        apart = max(apart, ratio(distance(total, reference[name]), norm(reference[name])))
    allowed = pair.tolerance.allowed(wrong)
    return [dataclasses.replace(f, distance=apart, allowed=allowed) for f in findings]


def _without_gradient(
    pair: StepPair, raw: Sequence[Named], wrong: Sequence[str]
) -> Iterator[Finding]:
    """Finds weights without a gradient in one recording, or on some replicas only.

    Examples that do not use a weight have no gradient either; the gradient of the whole batch is
    then right.
    """
    step, reference = pair.second, pair.gradients.reference
    of_raw = {name: [r for r, own in enumerate(raw) if not np.any(own[name])] for name in wrong}
    not_frozen = [name for name in wrong if not norm(reference[name])]
    frozen = [n for n in wrong if len(of_raw[n]) == len(raw) and n not in not_frozen]
    known = {*frozen, *not_frozen}
    left_out = [name for name in wrong if name not in known and is_left_out(pair, name)]
    if left_out:
        text = (
            f"the optimizer does not have {len(left_out)} weights, and clears no gradient of them"
        )
        yield step.found("gradients", "not_updated", text, tensors=left_out)
    if frozen and len(frozen) == len(reference) and _has_sums(pair, frozen):
        text = "what the replicas reduce is not 0, and all gradients are multiplied by 0 before the"
        text += " update, as by the inverse of a norm that overflows"
        yield step.found("clipping", "other_clipping", text, tensors=frozen)
    elif frozen:
        text = f"the gradient of {len(frozen)} weights is 0, and not so in the first recording"
        yield step.found("gradients", "frozen", text, tensors=frozen)
    if not_frozen:
        text = f"the gradient of {len(not_frozen)} weights is 0 in the first recording only"
        yield step.found("gradients", "not_frozen", text, tensors=not_frozen)
    if len(raw) != len(step.shards) or len(raw) < 2:
        return
    idle = {s for s, size in enumerate(step.sizes) if not size and step.has("data")}
    groups: dict[tuple[int, ...], list[str]] = {}
    for name in wrong:
        without = tuple(shard for shard in of_raw[name] if shard not in idle)
        if without and name not in (*known, *left_out):
            groups.setdefault(without, []).append(name)
    for shards, names in groups.items():
        text = f"the gradient of {len(names)} weights is 0 or missing on these replicas only"
        yield step.found("gradients", "frozen", text, items=shards, tensors=names)


def _has_sums(pair: StepPair, names: Sequence[str]) -> bool:
    """Returns whether reduced gradients are recorded, and not 0."""
    step = pair.second
    sums = pair.matching.to_first(step.named("sums")[0]) if step.has("sums") else {}
    return all(name in sums and norm(sums[name]) for name in names)


def _reordered(pair: StepPair, wrong: Sequence[str]) -> list[Finding]:
    """Finds a weight whose inputs are in another order in both scripts."""
    for name in wrong:
        if text := reordered_rows(pair, name):
            return [pair.second.found("gradients", "flatten_order", text, tensors=[name])]
    return []


def _by_tensor(
    pair: StepPair, raw: Sequence[Named], right: Sequence[float], wrong: Sequence[str]
) -> list[Finding]:
    """Explains gradients one by one, and groups them; empty if one of them is unexplained."""
    by_layers = differ_by_layers(pair)

    def why(name: str) -> tuple[str, str]:
        arrays = _arrays_of(pair, raw, right, name)
        known = why_tensor(*arrays, len(raw)) if arrays[0].size > 1 else ("unexplained", "")
        if known[0] in ("unexplained", "scaled_gradient"):
            known = (None if by_layers else why_part(*arrays)) or ("unexplained", "")
        return known

    rows = explained_apart(wrong, why)
    if any(row.detail == "unexplained" for row, *_ in rows):
        return []
    return [
        pair.second.found("gradients", row.detail, row.text, tensors=names)
        for row, names, _ in rows
    ]


def _arrays_of(
    pair: StepPair, raw: Sequence[Named], right: Sequence[float], name: str
) -> tuple[np.ndarray, np.ndarray, float]:
    """Returns a gradient, that of the reference, and the distance that rounding can cause."""
    total = np.sum([f * own[name] for f, own in zip(right, raw, strict=True)], axis=0)
    reference = pair.gradients.reference[name]
    return total, reference, pair.tolerance.allowed([name]) * norm(reference)


def _part_of(
    pair: StepPair, raw: Sequence[Named], right: Sequence[float], wrong: Sequence[str]
) -> str:
    """Returns in which part of one gradient alone all of the difference is; "" if in several."""
    if len(wrong) > 1 or differ_by_layers(pair):
        return ""
    _, text = why_part(*_arrays_of(pair, raw, right, wrong[0])) or ("", "")
    return text
