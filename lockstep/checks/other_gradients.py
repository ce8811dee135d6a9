"""Compares the gradients of a step with those of another trace, and explains differences."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from lockstep.arithmetic import dense, factor_of, norm, scaled_all, total_norm
from lockstep.checks.random_numbers import is_random
from lockstep.context import Context
from lockstep.hypotheses.of_layers import (
    kind_of,
    local_statistics,
    num_local_norms,
    other_settings,
    reordered_rows,
)
from lockstep.hypotheses.of_tensors import why_tensor
from lockstep.oracles.recording import EXACT, StepPair, Tolerance, whole_gradient
from lockstep.oracles.rules import IN_GRADIENT, RuleOracle
from lockstep.trace import Named
from lockstep.verdict import BY_DESIGN, Finding


class Explanation(NamedTuple):
    """A computed cause of different gradients.

    Attributes:
        cause: a key of `causes.CAUSES`.
        text: one sentence with the numbers.
        tensors: names of the weights that it explains.
        design: whether it is by design.
    """

    cause: str
    text: str
    tensors: Sequence[str]
    design: bool = False


def compare_gradients(pair: StepPair, tolerance: Tolerance) -> list[Finding] | None:
    """Compares the gradients of the whole batch, which start from the same state.

    Returns:
        The findings; None if a trace has no such gradient.
    """
    first, second = pair.gradients()
    if not first:
        return None
    far = tolerance.wrong(second, first)
    if not far:
        return []

    def found(why: Explanation, others: Sequence[Explanation] = ()) -> Finding:
        finding = pair.found(
            "gradients", why.cause, why.text, design=why.design, tensors=why.tensors,
            distance=max(far.values()), allowed=tolerance.allowed(list(far)),
        )  # fmt: skip
        may_be = (*finding.may_be, *(other.cause for other in others))
        return dataclasses.replace(finding, may_be=tuple(dict.fromkeys(may_be)))

    findings = []
    frozen = [name for name in far if not norm(second[name]) or not norm(first[name])]
    if frozen:
        text = f"the gradient of {len(frozen)} weights is 0 in one recording"
        findings.append(found(Explanation("frozen", text, frozen)))
    wrong = [name for name in far if name not in frozen]
    if not wrong:
        return findings
    asked = _Asked(pair, first, second, wrong, frozen, tolerance)
    if fitting := list(_explanations(asked)):
        return [*findings, found(fitting[0], fitting[1:])]
    return findings + [found(why) for why in _without_computation(asked)]


class _Asked(NamedTuple):
    """Different gradients of a step.

    Attributes:
        pair: the step.
        first, second: the gradients in the reference and in the checked trace.
        wrong: names of the gradients to explain.
        frozen: names of other gradients that differ.
        tolerance: what rounding can cause.
    """

    pair: StepPair
    first: Named
    second: Named
    wrong: Sequence[str]
    frozen: Sequence[str]
    tolerance: Tolerance

    def explains(self, *terms: Named) -> bool:
        """Returns whether the sum of some terms, and not the reference, gives the gradients."""
        if self.tolerance.wrong(self.second, *terms, but=self.frozen):
            return False
        total = {n: np.sum([dense(t[n]) for t in terms if n in t], axis=0) for n in self.wrong}
        return set(self.tolerance.wrong(total, self.first)) == set(self.wrong)


def _explanations(asked: _Asked) -> Iterator[Explanation]:
    """Yields the causes whose prediction fits, the most certain first."""
    pair, first, second, wrong, frozen, tolerance = asked
    names = [name for name in second if name not in frozen]
    scale = factor_of([second[n] for n in names], [first[n] for n in names])
    if np.isfinite(scale) and scale and asked.explains(scaled_all(first, scale)):
        yield Explanation(*_name_of_factor(pair, scale), wrong)
    yield from _mean_of_means(asked)
    yield from _regularised(asked)
    yield from _stale(asked)
    for cause, text, tensors in reordered_rows(pair, first, second, wrong, tolerance):
        yield Explanation(cause, text, tensors)


def _name_of_factor(pair: StepPair, scale: float) -> tuple[str, str]:
    """Returns the cause of a common factor of all gradients, and a sentence."""
    text = f"each gradient is {scale:.6g} times that of the first recording"
    second, first = (step.trace.about.num_replicas for step, _ in pair.both)

    def near(number: float) -> bool:
        return abs(scale - number) < 1e-3 * number

    if second != first and near(second / first):
        return "sum_instead_of_mean", f"{text}, the number of replicas"
    if second != first and near(first / second):
        return "mean_instead_of_sum", f"{text}, one over the number of replicas"
    sizes = {size for step, _ in pair.both for size in step.sizes[:1]}
    for size in {*sizes, sum(pair.second.sizes)}:
        if size > 1 and (near(size) or near(1 / size)):
            return "other_loss_reduction", f"{text}; a replica has {size} examples: sum, not mean"
    for step, which in pair.both:
        for weights in _example_weights(step):
            if near(mean := float(weights.mean())) or near(1 / mean):
                return "other_loss_reduction", (
                    f"{text}: {mean:.6g} is the mean of the weights of the examples in the {which}"
                    " recording; one script divides by their sum, the other by their number"
                )
    return "scaled_gradient", text


def _example_weights(context: Context) -> list[np.ndarray]:
    """Returns the arrays of a step that may be weights of its examples."""
    if not context.has("data"):
        return []
    count = context.sizes[0]
    return [
        array
        for array in context.data[0]
        if array.size == count and array.dtype.kind == "f" and array.min() >= 0 < array.mean()
    ]


def _mean_of_means(asked: _Asked) -> Iterator[Explanation]:
    """Explains gradients by replicas that are averaged with equal weight.

    Replicas may have different numbers of examples, or different sums of sample weights or masks;
    the gradient of the whole batch is then another weighted sum of the sent gradients.
    """
    pair, first, _, wrong, _, tolerance = asked
    step = pair.second
    if len(step.shards) < 2 or not step.has("raw"):
        return
    sent = [{n: dense(g) for n, g in pair.in_first(own).items()} for own in step.named("raw")]
    if not all(name in own for own in sent for name in first):
        return
    usual = step.share(0)
    # Synchronized layers send gradients to other replicas; only the weights after them are
    # conclusive.
    is_coupled = any(kind_of(layer) == "batchnorm" for layer in step.trace.about.layers)

    def fitting(shares: Sequence[float]) -> list[str]:
        # The expected gradient is computed as a whole, the sent ones one by one.
        terms = [scaled_all(own, share) for share, own in zip(shares, sent, strict=True)]
        far = tolerance.wrong({name: first[name] for name in wrong}, *terms)
        return [name for name in wrong if name not in far]

    sizes = step.sizes
    if all(sizes) and len(set(sizes)) > 1:
        shares = [usual * len(sizes) * size / sum(sizes) for size in sizes]
        right = fitting(shares)
        if len(right) == len(wrong) or (is_coupled and right):
            text = (
                f"the replicas have {', '.join(map(str, sizes))} examples and count equally;"
                f" weighted by their examples, the gradients of {', '.join(right[:3])} are right"
            )
            yield Explanation("mean_of_means", text, wrong)
            return
    columns = [np.concatenate([own[name].ravel() for name in wrong]) for own in sent]
    target = np.concatenate([dense(first[name]).ravel() for name in wrong])
    if len(target) <= len(sent):  # A few elements do not determine the factors.
        return
    shares = np.linalg.lstsq(np.stack(columns, axis=1), target, rcond=None)[0].tolist()
    count_unequally = max(shares) - min(shares) > 1e-3 * max(map(abs, shares))
    if count_unequally and len(fitting(shares)) == len(wrong):
        listed = ", ".join(f"{share / usual:.4g}" for share in shares)
        text = (
            f"the replicas count equally; counted {listed} times, their gradients give that of the"
            " whole batch, as with other sums of sample weights or masks"
        )
        yield Explanation("mean_of_means", text, wrong)


def _regularised(asked: _Asked) -> Iterator[Explanation]:
    """Explains gradients by a term λ · weight that only one of the losses adds."""
    pair, first, second, wrong, *_ = asked
    weights, _ = pair.states("before")
    if not all(name in weights for name in wrong):
        return
    differences = [dense(second[n]) - dense(first[n]) for n in wrong]
    decay = factor_of(differences, [weights[name] for name in wrong])
    if not np.isfinite(decay) or not decay:
        return
    if asked.explains(first, {name: decay * dense(weights[name]) for name in wrong}):
        which = "second" if decay > 0 else "first"
        text = (
            f"the gradients of the {which} recording contain {abs(decay):.4g} · weight: a"
            " regularisation in its loss"
        )
        design = _decays_equally(asked)
        if design:
            text += ", and the optimizer of the other one decays the weights by as much"
        yield Explanation("regularisation_in_the_loss", text, wrong, design)


def _decays_equally(asked: _Asked) -> bool:
    """Returns whether one script has in its loss the weight decay of the other's optimizer.

    Gradient + λ · weight is then the same in both, if the gradient without decay is not clipped.
    """
    pair, both = asked.pair, (asked.first, asked.second)
    applied = pair.applied()
    if not applied[0] or any(
        EXACT.wrong({n: after[n] for n in before}, before)
        for before, after in zip(both, applied, strict=True)
    ):
        return False
    weights, _ = pair.states("before")
    terms = []
    for step, gradients in ((pair.first, both[0]), (pair.second, both[1])):
        rules = step.updater.rules if isinstance(step.updater, RuleOracle) else {}
        decayed = {}
        for name in gradients:
            rule = rules.get(name if step is pair.first else pair.in_second(name))
            if rule is None or (rule.weight_decay and rule.decay_placement != IN_GRADIENT):
                return False
            decayed[name] = rule.weight_decay * dense(weights[name])
        terms.append(decayed)
    second = {name: dense(g) + terms[1][name] for name, g in both[1].items()}
    return not asked.tolerance.wrong(second, both[0], terms[0])


def _stale(asked: _Asked) -> Iterator[Explanation]:
    """Explains gradients by those of the step before."""
    step = asked.pair.first
    if step.follows:
        earlier = whole_gradient(Context(step.trace, step.position - 1))
        if asked.wrong[0] in earlier and asked.explains(earlier):
            text = "the gradients are those of the previous step"
            yield Explanation("stale_gradient", text, asked.wrong)


def _without_computation(asked: _Asked) -> Iterator[Explanation]:
    """Yields causes of single gradients, else all settings of layers that differ."""
    pair, first, second, wrong, _, tolerance = asked
    groups: dict[tuple[str, str], list[str]] = {}
    for name in wrong:
        limit = tolerance.allowed([name]) * norm(first[name])
        why = why_tensor(second[name], first[name], limit, len(pair.second.shards))
        groups.setdefault(why if np.size(second[name]) > 1 else ("unexplained", ""), []).append(
            name
        )
    if all(cause != "unexplained" for cause, _ in groups):
        yield from (Explanation(*why, names) for why, names in groups.items())
        return
    causes = [*local_statistics(pair), *other_settings(pair)]
    # If neither script synchronizes BatchNorm, it is by design.
    is_choice = all(num_local_norms(step) for step, _ in pair.both)
    for cause, text in causes:
        yield Explanation(cause, text, wrong, cause == "local_statistics" and is_choice)
    if causes:
        return
    if any(is_random(layer) for step, _ in pair.both for layer in step.trace.about.layers):
        text = "random layers draw other numbers in the two recordings"
        yield Explanation("random_layers", text, wrong, True)
        return
    text = f"{len(wrong)} of {len(first)} gradients differ, and no known cause explains it"
    yield Explanation("unexplained", text, wrong)


def compare_clipping(pair: StepPair, tolerance: Tolerance) -> list[Finding] | None:
    """Compares the clipping factors of gradients that agree."""
    both, applied = pair.gradients(), pair.applied()
    if not both[0] or not applied[0]:
        return None
    if not (far := tolerance.wrong(applied[1], applied[0])):
        return []
    scales = [
        factor_of([after[name] for name in after], [before[name] for name in after])
        for before, after in zip(both, applied, strict=True)
    ]
    norms = [total_norm(gradients) for gradients in applied]
    text = (
        f"gradients are multiplied by {scales[0]:.6g} (to norm {norms[0]:.4g}) in the first"
        f" recording and by {scales[1]:.6g} (to norm {norms[1]:.4g}) in the second"
    )
    return [pair.found("clipping", "other_clipping", text, distance=max(far.values()))]


def explained_by(
    gradients: Sequence[Finding] | None, others: list[Finding] | None, unexplained: str
) -> list[Finding] | None:
    """Returns findings with the cause of different gradients, if it is known and theirs is not."""
    if not gradients or not others or gradients[0].cause == "unexplained":
        return others
    found = gradients[0]
    known = {"status": found.status, "cause": found.cause, "may_be": found.may_be}
    return [
        dataclasses.replace(each, **known) if each.cause == unexplained else each  # type: ignore[arg-type]
        for each in others
    ]


def is_decay_in_loss(findings: Sequence[Finding] | None) -> bool:
    """Returns whether weight decay is in the loss of one script, with the same value."""
    return any(
        (each.cause, each.status) == ("regularisation_in_the_loss", BY_DESIGN)
        for each in findings or ()
    )
