"""Compares the gradients of a step with those of another trace, and explains differences."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.answer.verdict import BY_DESIGN, FAULT, Finding
from lockstep.arithmetic import (
    EPS,
    MARGIN,
    UNITS,
    dense,
    factor_of,
    fitted,
    is_far,
    norm,
    ratio,
    scaled,
    scaled_all,
    total_norm,
)
from lockstep.checks.other_examples import losses_of
from lockstep.checks.other_forward import other_layers
from lockstep.checks.other_updates import is_left_out
from lockstep.context import Context
from lockstep.hypotheses.of_axes import not_reduced, sizes_of_axes
from lockstep.hypotheses.of_layers import kind_of, reordered_rows
from lockstep.hypotheses.of_micro_batches import factors_of_micro_batches, removed_gradients
from lockstep.hypotheses.of_tensors import why_tensor
from lockstep.matched_examples import matched_examples
from lockstep.oracles.rules import IN_GRADIENT
from lockstep.reference import StepPair
from lockstep.trace import Named

# Of gradients and losses that differ by design.
_OTHER_SCALE, _ROUGHLY, _MUCH_LESS = 1.5, 0.2, 3
_ALIKE, _SIMILAR = 0.9, 0.5  # Cosines of gradients; the latter if losses differ by the same factor.
_SHARE = 1e-3  # Relative; of factors that arrays give.
_CLOSE = 1e-4  # Relative; of gradients that have a common factor.
_STEEP = 8  # Losses move by less than so many times the change of outputs.
_MOST = 0.8  # The 6 last bits of one in 64 float32 numbers are 0.


def compare_gradients(pair: StepPair) -> Iterator[Finding]:
    """Compares the gradients of the whole batch, which start from the same state."""
    first, second = pair.gradients
    if not (first and pair.computes_the_same):
        return
    pair.second.mark_checked()
    far = pair.different_gradients
    frozen = [name for name in far if not norm(second[name]) or not norm(first[name])]
    left_out = [n for n in far if n not in frozen and is_left_out(pair, n)]
    wrong = [name for name in far if name not in (*frozen, *left_out)]
    causes = []
    for cause, text, names in not_reduced(pair):
        causes.append(pair.second.found(cause, text, tensors=names))
        wrong = [name for name in wrong if name not in names]
    if any(f.status == FAULT and f.detail != "other_loss" for f in pair.found_in("loss")):
        causes, frozen, wrong = causes + _settings(pair, list(far)), [], []
    elif left_out:
        text = (
            f"the optimizer does not have {len(left_out)} weights, and clears no gradient of them"
        )
        causes.append(pair.second.found("not_updated", text, tensors=left_out))
    if frozen:
        text = f"the gradient of {len(frozen)} weights is 0 in one recording"
        causes.append(pair.second.found("frozen", text, tensors=frozen))
    if wrong and (fitting := list(_explanations(pair, wrong))):
        may_be = (*fitting[0].may_be, *(other.detail for other in fitting[1:]))
        causes.append(dataclasses.replace(fitting[0], may_be=may_be))
    elif wrong:
        causes += _frozen_on_some(pair, wrong)
        rest = [n for n in wrong if not any(n in each.tensors for each in causes)]
        if rest:
            causes += _by_tensor(pair, rest) or _settings(pair, rest)
    allowed, apart = pair.tolerance.allowed(list(far)), max(far.values(), default=0.0)
    for finding in causes:
        yield dataclasses.replace(finding, distance=apart, allowed=allowed)


def _frozen_on_some(pair: StepPair, wrong: Sequence[str]) -> Iterator[Finding]:
    """Finds gradients that some replicas do not send, or send as 0, while other replicas do.

    Examples that do not use a weight have no gradient either; the gradient of the whole batch is
    then right.
    """
    step = pair.second
    if len(step.shards) < 2 or not step.has("raw"):
        return
    groups: dict[tuple[int, ...], list[str]] = {}
    sent = [pair.matching.to_first(own) for own in step.named("raw")]
    idle = {s for s, size in enumerate(step.sizes) if not size and step.has("data")}
    for name in wrong:
        zeros = [s for s, own in enumerate(sent) if not norm(own.get(name, 0.0))]
        without = tuple(s for s in zeros if s not in idle)
        if without and len(zeros) < len(sent):
            groups.setdefault(without, []).append(name)
    for shards, names in groups.items():
        text = f"the gradient of {len(names)} weights is 0 or missing on these replicas only"
        yield step.found("frozen", text, items=shards, tensors=names)


def _explanations(pair: StepPair, wrong: Sequence[str]) -> Iterator[Finding]:
    """Yields the causes whose prediction fits, the most certain first."""
    (first, second), found = pair.gradients, pair.second.found
    scale = factor_of([second[name] for name in wrong], [first[name] for name in wrong])
    is_factor = bool(np.isfinite(scale) and scale)
    is_of_all = is_factor and _explains(pair, wrong, scaled_all(first, scale))
    multiple = {n: scaled(g, scale) if n in wrong else g for n, g in first.items()}
    if is_of_all or (is_factor and _explains(pair, wrong, multiple)):
        which = "each gradient is" if is_of_all else f"the gradients of {len(wrong)} weights are"
        text = f"{which} {scale:.6g} times that of the first recording"
        named_factors = _of_factor(pair, scale, text)
        if not is_of_all:  # The loss, and mostly the number of micro-batches, changes all of them.
            named_factors = [each for each in named_factors if each[0] != "other_loss_reduction"]
            named_factors.sort(key=lambda each: each[0] == "micro_batches_not_averaged")
        for named in named_factors:
            if is_of_all or named[0] != "scaled_gradient":
                yield found(*named, tensors=wrong)
    if why := _mean_of_means(pair, wrong):
        yield found(*why, tensors=wrong)
    yield from _regularised(pair, wrong)
    for why, terms in removed_gradients(pair):
        if _explains(pair, wrong, *terms):
            yield found(*why, tensors=wrong)
    if (kept := pair.kept_gradients) and _explains(pair, wrong, first, kept):
        text = "the gradients of the previous step are not cleared, and those of this one are added"
        yield found("stale_gradient", text, tensors=wrong)
    if wrong[0] in pair.earlier_gradients and _explains(pair, wrong, pair.earlier_gradients):
        yield found("stale_gradient", "the gradients are those of the previous step", tensors=wrong)
    for name in wrong:
        if text := reordered_rows(pair, name):
            yield found("flatten_order", text, tensors=[name])
            break


def _explains(pair: StepPair, wrong: Sequence[str], *terms: Named) -> bool:
    """Returns whether the sum of some terms, and not the reference, gives the gradients."""
    first, second = pair.gradients
    equal = [name for name in second if name not in pair.different_gradients]
    if pair.tolerance.wrong({name: second[name] for name in (*equal, *wrong)}, *terms):
        return False
    total = {n: np.sum([dense(t[n]) for t in terms if n in t], axis=0) for n in wrong}
    return set(pair.tolerance.wrong(total, first)) == set(wrong)


def _of_factor(
    pair: StepPair, scale: float, text: str, within: float = _SHARE
) -> list[tuple[str, str]]:
    """Returns causes and texts of a common factor of all gradients, the most likely first."""
    found = [(cause, f"{text}: {why}") for cause, why in names_of_factor(pair, scale, within)]
    return found or [("scaled_gradient", text)]


def names_of_factor(pair: StepPair, scale: float, within: float = _SHARE) -> list[tuple[str, str]]:
    """Returns the causes of a common factor of all gradients, and what the factor is, in words."""
    known = [*factors_of_micro_batches(pair), *sizes_of_axes(pair)]  # Factor, cause, reason.
    second, first = (step.trace.about.num_replicas for step, _ in pair.both)
    if second != first:
        counts = {step.trace.micro_batches(step.position, 0) for step, _ in pair.both}
        # Wrappers compute means. Of as many micro-batches, a mean is more likely than a division
        # by their number.
        place = 0 if len(counts) == 1 else len(known)
        of_mean = (first / second, "mean_instead_of_sum", "one over the number of replicas")
        known.insert(place, of_mean)
        known.append((second / first, "sum_instead_of_mean", "the number of replicas"))
    sizes = {sum(step.sizes): "the batch" for step, _ in pair.both}
    sizes |= {step.sizes[0]: "a replica" for step, _ in pair.both if len(step.sizes) > 1}
    for size, whose in sizes.items():
        if size < 2:
            continue
        why = f"{whose} has {size} examples: sum, not mean"
        known += [(factor, "other_loss_reduction", why) for factor in (size, 1 / size)]
    size, full = sum(pair.second.sizes), sum(Context(pair.second.trace, 0).sizes)
    if 0 < size < full:
        why = f"divided by {full} examples, as in full batches, and this one has {size}"
        of_short = [
            (size / full, "wrong_count", f"the loss is {why}"),
            (full / size, "other_loss_reduction", f"the loss of the first recording is {why}"),
        ]
        known = [*of_short, *known] if _agree_at_first(pair) else [*known, *of_short]
    for step, which in pair.both:
        for mean in _mean_weights(step):
            why = (
                f"{mean:.6g} is the mean of the weights of the examples in the {which} recording;"
                " one script divides by their sum, the other by their number"
            )
            known += [(factor, "other_loss_reduction", why) for factor in (mean, 1 / mean)]
    found: dict[str, str] = {}  # One reason for each cause, the most likely first.
    for factor, cause, why in known:
        if abs(scale - factor) < within * factor:
            found.setdefault(cause, why)
    return [*found.items()]


def _agree_at_first(pair: StepPair) -> bool:
    """Returns whether the gradients of the first recorded step agree."""
    first, second = Context(pair.first.trace, 0), Context(pair.second.trace, 0)
    start = StepPair(first, second, pair.matching, pair.tolerance)
    is_same = first.number == second.number and start.starts_equally
    return is_same and bool(start.gradients[0]) and not start.different_gradients


def _mean_weights(context: Context) -> list[float]:
    """Returns the means of the arrays of a step that may be weights of its examples."""
    count = context.sizes[0]
    arrays = [a for a in context.data[0] if a.size == count > 0 and a.dtype.kind == "f"]
    return [float(a.mean()) for a in arrays if a.min() >= 0 < a.mean()]


def _mean_of_means(pair: StepPair, wrong: Sequence[str]) -> tuple[str, str] | None:
    """Explains gradients by replicas that are averaged with equal weight, or clip their own ones.

    Replicas may have different numbers of examples, or different sums of sample weights or masks;
    the gradient of the whole batch is then another weighted sum of the sent gradients. Those that
    are clipped have the same norm.
    """
    step, expected = pair.second, {name: pair.gradients[0][name] for name in wrong}
    if len(step.shards) < 2 or not step.has("raw"):
        return None
    to_first = pair.matching.to_first
    sent = [{n: dense(g) for n, g in to_first(own).items()} for own in step.named("raw")]
    if not all(name in own for own in sent for name in wrong):
        return None
    # Synchronized layers send gradients to other replicas; only the weights after them are
    # conclusive.
    is_coupled = not pair.has_same_shards and any(
        kind_of(layer) == "batchnorm" for layer in step.trace.about.layers
    )
    sizes, num = step.sizes, len(sent)
    norms = [total_norm(own) for own in sent]
    candidates = []  # Shares of the sent gradients, reason, fewest gradients that they give.
    if all(sizes) and len(set(sizes)) > 1:
        shares = [step.share(0) * num * size / sum(sizes) for size in sizes]
        reason = f"as they have {', '.join(map(str, sizes))} examples"
        candidates.append((shares, reason, 1 if is_coupled else len(wrong)))
    columns = [np.concatenate([own[name].ravel() for name in wrong]) for own in sent]
    target = np.concatenate([dense(expected[name]).ravel() for name in wrong])
    if len(target) > num:  # Fewer elements do not determine the factors.
        shares = fitted(np.stack(columns, axis=1), target).tolist()
        is_whole = abs(sum(shares) - num * step.share(0)) < _SHARE
        if is_whole and np.ptp(shares) > _SHARE * max(shares):
            reason = "as with other sums of sample weights or masks"
            candidates.append((shares, reason, len(wrong)))
        elif np.ptp(norms) < _SHARE * max(norms) and min(shares) > step.share(0):
            candidates.append((shares, "", len(wrong)))
    for shares, reason, fewest in candidates:
        # The expected gradient is computed as a whole, the sent ones one by one.
        terms = [scaled_all(own, share) for share, own in zip(shares, sent, strict=True)]
        if len(wrong) - len(pair.tolerance.wrong(expected, *terms)) >= fewest:
            listed = ", ".join(f"{share / step.share(0):.4g}" for share in shares)
            if not reason:
                text = f"each replica clips its own gradient to norm {norms[0]:.4g} before the sum"
                return "clipped_before_the_sum", f"{text}: they are {listed} times as large"
            return "mean_of_means", (
                f"the replicas count equally; counted {listed} times, {reason}, their gradients"
                " give that of the whole batch"
            )
    return None


def _regularised(pair: StepPair, wrong: Sequence[str]) -> Iterator[Finding]:
    """Explains gradients by a term λ · weight that only one of the losses adds."""
    (first, second), (weights, _) = pair.gradients, pair.states("before")
    if not all(name in weights for name in wrong):
        return
    yield from _scaled_without_decay(pair, wrong, weights)
    differences = [dense(second[n]) - dense(first[n]) for n in wrong]
    decay = factor_of(differences, [weights[name] for name in wrong])
    more = {name: decay * dense(weights[name]) for name in wrong}
    if np.isfinite(decay) and decay and _explains(pair, wrong, first, more):
        if times := _times_regularised(pair, wrong, weights, decay):
            cause = "regulariser_repeated" if times > 0 else "regulariser_missing"
            text = (
                f"the loss contains {1 + times} times the regularisation of the first recording,"
                f" whose gradient is {decay / times:.4g} · weight"
            )
            yield pair.second.found(cause, text, tensors=wrong)
            return
        text = (
            f"the gradients of the {'second' if decay > 0 else 'first'} recording contain"
            f" {abs(decay):.4g} · weight: a regularisation in its loss"
        )
        design = _decays_equally(pair, weights)
        if design:
            text += ", and the optimizer of the other one decays the weights by as much"
        yield pair.second.found("regularisation_in_the_loss", text, tensors=wrong, design=design)


def _times_regularised(pair: StepPair, wrong: Sequence[str], weights: Named, decay: float) -> int:
    """Returns how many times more often the second loss has the L2 regularisation of the first.

    The sum of the model's regularisation losses, λ · |weights|², is recorded; its gradient is
    2 · λ · weight. Returns 0 if it is unknown, or not a multiple of it.
    """
    arrays = pair.first.arrays(pair.first.kind_of_loss)
    regular = sum(float(np.sum(each[1])) for each in arrays if len(each) > 1)
    usual = 2 * regular / max(total_norm({name: weights[name] for name in wrong}) ** 2, EPS)
    times = decay / usual if usual else 0.0
    return round(times) if abs(times - round(times)) < 1e-3 and times > -1.5 else 0


def _scaled_without_decay(
    pair: StepPair, wrong: Sequence[str], weights: Named
) -> Iterator[Finding]:
    """Explains gradients that are multiplied by a factor, but not their regularisation."""
    first, second = pair.gradients
    scales = {n: factor_of([second[n]], [first[n]]) for n in wrong}
    exact = [n for n in wrong if not is_far(second[n], scales[n] * dense(first[n]), _CLOSE)]
    rest = [name for name in wrong if name not in exact]
    scale = float(np.median([scales[name] for name in exact])) if exact and rest else 0.0
    if not scale > 0:
        return
    differences = [dense(second[n]) - scale * dense(first[n]) for n in rest]
    decay = factor_of(differences, [weights[name] for name in rest])
    more = {name: decay * dense(weights[name]) for name in rest}
    if np.isfinite(decay) and decay and _explains(pair, wrong, scaled_all(first, scale), more):
        text = (
            f"each gradient is {scale:.6g} times that of the first recording, without its part"
            f" {abs(decay / (1 - scale)):.4g} · weight, the regularisation"
        )
        for why in _of_factor(pair, scale, text):
            yield pair.second.found(*why, tensors=wrong)


def _decays_equally(pair: StepPair, weights: Named) -> bool:
    """Returns whether one script has in its loss the weight decay of the other's optimizer.

    Gradient + λ · weight is then the same in both, if the gradient without decay is not clipped.
    """
    (first, second), rules, wrong = pair.gradients, pair.rules(), pair.tolerance.wrong
    if not all(name in rules and name in weights for name in first):
        return False
    own, other = (
        {
            name: rules[name][side].weight_decay * dense(weights[name])
            for name in first
            if rules[name][side].decay_placement == IN_GRADIENT
        }
        for side in (0, 1)
    )
    total = {name: dense(g) + other.get(name, 0.0) for name, g in second.items()}
    is_clipped = any(wrong(*each) for each in zip(pair.applied, pair.gradients, strict=True))
    return not is_clipped and not wrong(total, first, own)


def _by_tensor(pair: StepPair, wrong: Sequence[str]) -> list[Finding]:
    """Explains gradients one by one, and groups them; empty if one of them is unexplained."""
    first, second = pair.gradients
    groups: dict[tuple[str, str], list[str]] = {}
    for name in wrong:
        limit = pair.tolerance.allowed([name]) * norm(first[name])
        why = why_tensor(second[name], first[name], limit, len(pair.second.shards))
        if why[0] == "unexplained" or np.size(second[name]) < 2:
            return []
        groups.setdefault(why, []).append(name)
    return [pair.second.found(*why, tensors=names) for why, names in groups.items()]


def _settings(pair: StepPair, wrong: Sequence[str]) -> list[Finding]:
    """Returns what differs before the backward pass: in the loss, or in the layers."""
    earlier = [each for each in pair.findings if each.stage in ("forward", "loss")]
    known = [each for each in earlier if each.detail != "unexplained"]
    causes = [(each.detail, each.text, each.status == BY_DESIGN) for each in known]
    if not causes and (text := _other_dtypes(pair)):
        causes = [("reduced_precision", text, False)]
    causes = causes or other_layers(pair)
    is_design = bool(causes) and all(design for *_, design in causes)
    if is_design and (why := _despite_design(pair, wrong)):
        causes = [(*why, False)]
    if not causes:
        num = len(pair.gradients[0])
        text = f"{len(wrong)} of {num} gradients differ, and no known cause explains it"
        if pair.has("data", "y_pred", "y_grad") and not earlier:
            text += "; outputs and losses agree, so that it is in the backward pass or after it"
        causes.append(("unexplained", text, False))
    return [
        pair.second.found(cause, text, tensors=wrong, design=design)
        for cause, text, design in causes
    ]


def _despite_design(pair: StepPair, wrong: Sequence[str]) -> tuple[str, str] | None:
    """Explains gradients that differ by design, where more than that is seen.

    Normalising fewer examples, or other random numbers, change gradients and losses, but hardly
    their scale.
    """
    first, second = ({name: gradients[name] for name in wrong} for gradients in pair.gradients)
    times = ratio(total_norm(second), total_norm(first))
    losses = [
        [float(np.sum(np.float64(a[0]))) for a in step.arrays(step.kind_of_loss) if a]
        for step in (pair.first, pair.second)
    ]
    of_first, of_second = (float(np.mean(each)) if each else 0.0 for each in losses)
    if times and max(times, 1 / times) > _OTHER_SCALE:
        direction = factor_of([*second.values()], [*first.values()]) / times
        is_of_loss = of_first and abs(of_second / of_first - times) < _ROUGHLY * times
        if direction > (_SIMILAR if is_of_loss else _ALIKE):
            text = f"gradients are about {times:.2g} times as large as in the first recording"
            return _of_factor(pair, times, text, _ROUGHLY)[0]
    if text := _moved_loss(pair):
        return "other_loss", text
    sizes, is_mean = pair.second.sizes, pair.second.trace.about.reduction == "mean"
    if not (is_mean and all(sizes) and of_first and len(losses[1]) == len(sizes)):
        return None
    shares = [len(sizes) * size / sum(sizes) for size in sizes]
    of_each = [abs(loss / of_first - 1) for loss in losses[1]]
    weighted = [abs(x / of_first - by) for x, by in zip(losses[1], shares, strict=True)]
    if len(set(sizes)) > 1 and _MUCH_LESS * sum(of_each) < sum(weighted):
        text = f"the replicas have {', '.join(map(str, sizes))} examples, and count equally"
        return "mean_of_means", f"{text}: each loss is a mean over the replica's own examples"
    return None


def _moved_loss(pair: StepPair) -> str:
    """Explains losses that are further apart than other outputs can move them; "" if they are not.

    The cross-entropy of logits, or the root of a squared error, moves as far as the outputs.
    """
    outputs = [each for m in matched_examples(pair) for each in m.pairs["y_pred"]]
    moved = max((float(np.max(np.abs(dense(b) - dense(a)))) for a, b in outputs), default=np.inf)
    losses = [loss for loss in losses_of(pair.first) if loss > 0]
    others = [loss for loss in losses_of(pair.second) if loss > 0]
    apart = [min(abs(a - b), abs(a**0.5 - b**0.5)) for a in losses for b in others]
    if not apart or not min(apart) > _STEEP * moved:
        return ""
    return f"outputs differ by {moved:.2g} at most, and the losses by {min(apart):.2g} or more"


def _share_of_short(gradients: Named) -> float:
    """Returns the fraction of elements whose last bits are 0, as in sums of some 16-bit numbers."""
    elements = np.concatenate([dense(g).ravel() for g in gradients.values()]).astype(np.float32)
    bits = elements[elements != 0].view(np.uint32)
    return float(np.mean(bits & 0x3F == 0)) if len(bits) else 0.0


def _other_dtypes(pair: StepPair) -> str:
    """Explains gradients by layers that compute in another dtype; "" if they do not.

    It is also "" if rounding to this dtype does not have such an effect.
    """
    used = [
        {step.trace.computed_in(shard) for shard in step.shards}
        for step in (pair.first, pair.second)
    ]
    if used[0] == used[1]:
        short = [_share_of_short(gradients) for gradients in pair.gradients]
        if abs(short[0] - short[1]) < _MOST:
            return ""
        used = [{"bfloat16" if share > _MOST else "float32"} for share in short]
    unit = max(UNITS.get(dtype, EPS) for dtype in used[0] | used[1])
    if np.median([*pair.different_gradients.values()]) > MARGIN * unit:
        return ""
    first, second = (" and ".join(sorted(each)) for each in used)
    return f"layers compute in {first} in the first recording, and in {second} in the second"
