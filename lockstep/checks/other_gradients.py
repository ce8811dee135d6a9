"""Compares the gradients of a step with those of another trace, and explains differences."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.arithmetic import dense, factor_of, norm, scaled_all, total_norm
from lockstep.checks.random_numbers import is_random
from lockstep.context import Context
from lockstep.hypotheses.of_layers import (
    kind_of,
    num_local_norms,
    other_settings,
    reordered_rows,
)
from lockstep.hypotheses.of_tensors import why_tensor
from lockstep.oracles.recording import StepPair, Tolerance, Why, whole_gradient
from lockstep.oracles.rules import IN_GRADIENT
from lockstep.trace import Named
from lockstep.verdict import Finding


class _Asked(NamedTuple):
    """Different gradients of a step.

    Attributes:
        pair: the step.
        first, second: the gradients in the reference and in the checked trace.
        wrong: names of those that differ.
        tolerance: what rounding can cause.
    """

    pair: StepPair
    first: Named
    second: Named
    wrong: Sequence[str]
    tolerance: Tolerance

    def explains(self, *terms: Named) -> bool:
        """Returns whether the sum of some terms, and not the reference, gives the gradients."""
        if self.tolerance.wrong(self.second, *terms):
            return False
        total = {n: np.sum([dense(t[n]) for t in terms if n in t], axis=0) for n in self.wrong}
        return set(self.tolerance.wrong(total, self.first)) == set(self.wrong)


def compare_gradients(pair: StepPair, tolerance: Tolerance) -> list[Finding] | None:
    """Compares the gradients of the whole batch, which start from the same state.

    Returns:
        The findings; None if a trace has no such gradient.
    """
    first, second = pair.gradients
    if not first:
        return None
    far = tolerance.wrong(second, first)
    frozen = [name for name in far if not norm(second[name]) or not norm(first[name])]
    wrong = [name for name in far if name not in frozen]
    causes = []
    if frozen:
        text = f"the gradient of {len(frozen)} weights is 0 in one recording"
        causes.append(Why("frozen", text, frozen))
    if wrong:
        first, second = (
            {n: g for n, g in each.items() if n not in frozen} for each in pair.gradients
        )
        asked = _Asked(pair, first, second, wrong, tolerance)
        fitting = list(_explanations(asked))
        if fitting:
            may_be = tuple(why.cause for why in fitting[1:])
            causes.append(fitting[0]._replace(may_be=may_be))
        else:
            causes += _without_computation(asked)
    distances = max(far.values(), default=0.0), tolerance.allowed(list(far))
    return [pair.found("gradients", why, *distances) for why in causes]


def _explanations(asked: _Asked) -> Iterator[Why]:
    """Yields the causes whose prediction fits, the most certain first."""
    pair, first, second, wrong, _ = asked
    scale = factor_of(list(second.values()), list(first.values()))
    if np.isfinite(scale) and scale and asked.explains(scaled_all(first, scale)):
        yield Why(*_name_of_factor(pair, scale), wrong)
    yield from _mean_of_means(asked)
    yield from _regularised(asked)
    step = pair.first
    if step.follows:
        earlier = whole_gradient(Context(step.trace, step.position - 1))
        if wrong[0] in earlier and asked.explains(earlier):
            yield Why("stale_gradient", "the gradients are those of the previous step", wrong)
    yield from reordered_rows(pair, first, second, wrong)


def _name_of_factor(pair: StepPair, scale: float) -> tuple[str, str]:
    """Returns the cause of a common factor of all gradients, and a sentence."""
    text = f"each gradient is {scale:.6g} times that of the first recording"
    second, first = (step.trace.about.num_replicas for step, _ in pair.both)
    known = []  # Factor, cause, reason.
    if second != first:
        known = [
            (second / first, "sum_instead_of_mean", "the number of replicas"),
            (first / second, "mean_instead_of_sum", "one over the number of replicas"),
        ]
    sizes = {size for step, _ in pair.both for size in step.sizes[:1]} | {sum(pair.second.sizes)}
    for size in sizes - {0, 1}:
        why = f"a replica has {size} examples: sum, not mean"
        known += [(factor, "other_loss_reduction", why) for factor in (size, 1 / size)]
    for step, which in pair.both:
        for mean in _mean_weights(step):
            why = (
                f"{mean:.6g} is the mean of the weights of the examples in the {which} recording;"
                " one script divides by their sum, the other by their number"
            )
            known += [(factor, "other_loss_reduction", why) for factor in (mean, 1 / mean)]
    for factor, cause, why in known:
        if abs(scale - factor) < 1e-3 * factor:
            return cause, f"{text}: {why}"
    return "scaled_gradient", text


def _mean_weights(context: Context) -> list[float]:
    """Returns the means of the arrays of a step that may be weights of its examples."""
    if not context.has("data"):
        return []
    count = context.sizes[0]
    arrays = [a for a in context.data[0] if a.size == count and a.dtype.kind == "f"]
    return [float(a.mean()) for a in arrays if a.min() >= 0 < a.mean()]


def _mean_of_means(asked: _Asked) -> Iterator[Why]:
    """Explains gradients by replicas that are averaged with equal weight.

    Replicas may have different numbers of examples, or different sums of sample weights or masks;
    the gradient of the whole batch is then another weighted sum of the sent gradients.
    """
    pair, first, _, wrong, tolerance = asked
    step = pair.second
    if len(step.shards) < 2 or not step.has("raw"):
        return
    sent = [{n: dense(g) for n, g in pair.in_first(own).items()} for own in step.named("raw")]
    if not all(name in own for own in sent for name in first):
        return
    # Synchronized layers send gradients to other replicas; only the weights after them are
    # conclusive.
    is_coupled = any(kind_of(layer) == "batchnorm" for layer in step.trace.about.layers)
    sizes, num = step.sizes, len(sent)
    candidates = []  # Shares of the sent gradients, reason, fewest gradients that they give.
    if all(sizes) and len(set(sizes)) > 1:
        shares = [step.share(0) * num * size / sum(sizes) for size in sizes]
        reason = f"as they have {', '.join(map(str, sizes))} examples"
        candidates.append((shares, reason, 1 if is_coupled else len(wrong)))
    columns = [np.concatenate([own[name].ravel() for name in wrong]) for own in sent]
    target = np.concatenate([dense(first[name]).ravel() for name in wrong])
    if len(target) > num:  # Fewer elements do not determine the factors.
        shares = np.linalg.lstsq(np.stack(columns, axis=1), target, rcond=None)[0].tolist()
        if max(shares) - min(shares) > 1e-3 * max(map(abs, shares)):
            reason = "as with other sums of sample weights or masks"
            candidates.append((shares, reason, len(wrong)))
    for shares, reason, fewest in candidates:
        # The expected gradient is computed as a whole, the sent ones one by one.
        terms = [scaled_all(own, share) for share, own in zip(shares, sent, strict=True)]
        far = tolerance.wrong({name: first[name] for name in wrong}, *terms)
        if len(wrong) - len(far) >= fewest:
            listed = ", ".join(f"{share / step.share(0):.4g}" for share in shares)
            text = (
                f"the replicas count equally; counted {listed} times, {reason}, their gradients"
                " give that of the whole batch"
            )
            yield Why("mean_of_means", text, wrong)
            return


def _regularised(asked: _Asked) -> Iterator[Why]:
    """Explains gradients by a term λ · weight that only one of the losses adds."""
    pair, first, second, wrong, _ = asked
    weights, _ = pair.states("before")
    if not all(name in weights for name in wrong):
        return
    differences = [dense(second[n]) - dense(first[n]) for n in wrong]
    decay = factor_of(differences, [weights[name] for name in wrong])
    if not np.isfinite(decay) or not decay:
        return
    if asked.explains(first, {name: decay * dense(weights[name]) for name in wrong}):
        text = (
            f"the gradients of the {'second' if decay > 0 else 'first'} recording contain"
            f" {abs(decay):.4g} · weight: a regularisation in its loss"
        )
        design = _decays_equally(asked, weights)
        if design:
            text += ", and the optimizer of the other one decays the weights by as much"
        yield Why("regularisation_in_the_loss", text, wrong, design)


def _decays_equally(asked: _Asked, weights: Named) -> bool:
    """Returns whether one script has in its loss the weight decay of the other's optimizer.

    Gradient + λ · weight is then the same in both, if the gradient without decay is not clipped.
    """
    rules, wrong = asked.pair.rules(), asked.tolerance.wrong
    if not all(name in rules and name in weights for name in asked.first):
        return False
    if any(
        rule.weight_decay and rule.decay_placement != IN_GRADIENT
        for p in rules.values()
        for rule in p
    ):
        return False
    clipped = [wrong(*each) for each in zip(asked.pair.applied, asked.pair.gradients, strict=True)]
    of_first, of_second = (
        {n: rules[n][side].weight_decay * dense(weights[n]) for n in asked.first} for side in (0, 1)
    )
    total = {name: dense(g) + of_second[name] for name, g in asked.second.items()}
    return not any(clipped) and not wrong(total, asked.first, of_first)


def _without_computation(asked: _Asked) -> list[Why]:
    """Returns causes of single gradients, else all settings of layers that differ."""
    pair, first, second, wrong, tolerance = asked
    groups: dict[tuple[str, str], list[str]] = {}
    for name in wrong:
        limit = tolerance.allowed([name]) * norm(first[name])
        why = why_tensor(second[name], first[name], limit, len(pair.second.shards))
        groups.setdefault(why if np.size(second[name]) > 1 else ("unexplained", ""), []).append(
            name
        )
    if all(cause != "unexplained" for cause, _ in groups):
        return [Why(*why, names) for why, names in groups.items()]
    causes = []
    # If neither script synchronizes BatchNorm, it is by design.
    local = [(num_local_norms(step), step, which) for step, which in pair.both]
    for count, step, which in local:
        if count and step.trace.about.num_replicas > 1:
            text = (
                f"{count} BatchNorm layers of the {which} recording normalise the examples of each"
                " replica apart"
            )
            is_choice = all(number for number, *_ in local)
            causes.append(Why("local_statistics", text, wrong, is_choice))
    causes += [Why(cause, text, wrong) for cause, text in other_settings(pair)]
    if causes:
        return causes
    if any(is_random(layer) for step, _ in pair.both for layer in step.trace.about.layers):
        text = "random layers draw other numbers in the two recordings"
        return [Why("random_layers", text, wrong, True)]
    text = f"{len(wrong)} of {len(first)} gradients differ, and no known cause explains it"
    return [Why("unexplained", text, wrong)]


def compare_clipping(pair: StepPair, tolerance: Tolerance) -> list[Finding] | None:
    """Compares the clipping factors of gradients that agree."""
    if not pair.gradients[0] or not pair.applied[0]:
        return None
    far = tolerance.wrong(pair.applied[1], pair.applied[0])
    if not far:
        return []
    texts = []
    for sent, applied in zip(pair.gradients, pair.applied, strict=True):
        factor = factor_of(list(applied.values()), [sent[name] for name in applied])
        texts.append(f"{factor:.6g} (to norm {total_norm(applied):.4g})")
    text = (
        f"gradients are multiplied by {texts[0]} in the first recording and by {texts[1]} in the"
        " second"
    )
    return [pair.found("clipping", Why("other_clipping", text), max(far.values()))]
