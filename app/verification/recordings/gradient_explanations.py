"""Explains the difference of two gradients by hypotheses that are computed."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from app.verification.recordings.flatten_order import reordered_rows
from app.verification.recordings.layer_settings import (
    kind_of,
    local_statistics,
    other_settings,
)
from app.verification.recordings.optimizer_rules import IN_GRADIENT
from app.verification.recordings.recorded_step import Named, RecordedStep
from app.verification.recordings.step_pair import StepPair
from app.verification.recordings.trace_arrays import (
    distances_of,
    factor,
    norm,
)

Allowed = Callable[[str], float]  # Name of a weight → relative difference by rounding.
Explanation = tuple[str, str, Sequence[str]]  # A key of `REMEDIES`, a sentence, and the weights.


def explanations(
    pair: StepPair, first: Named, second: Named, wrong: Sequence[str], allowed: Allowed
) -> Iterator[Explanation]:
    """Yields explanations (cause, sentence and weights), the most certain first."""
    apart = distances_of(second, first)

    def explains(predicted: Named, slack: float = 4.0) -> bool:
        left = distances_of(second, predicted)
        is_near = all(far <= slack * allowed(name) for name, far in left.items())
        return is_near and all(left[name] < apart[name] / 2 for name in wrong)

    if frozen := [name for name in wrong if not norm(second[name]) or not norm(first[name])]:
        yield "frozen", f"the gradient of {len(frozen)} weights is 0 in one recording", frozen
    scale = factor(list(second.values()), [first[name] for name in second])
    if np.isfinite(scale) and scale and explains(_scaled(first, scale)):
        yield *_name_of_factor(pair, scale), wrong
    yield from _mean_of_means(pair, first, wrong, allowed)
    yield from _regularised(pair, first, second, wrong, explains)
    yield from reordered_rows(pair, first, second, wrong, allowed)


def explanations_by_settings(pair: StepPair, wrong: Sequence[str]) -> Iterator[Explanation]:
    """Yields the settings of layers that differ, each a possible cause."""
    for cause, text in (*local_statistics(pair), *other_settings(pair)):
        yield cause, text, wrong


def _scaled(gradients: Named, scale: float) -> Named:
    return {name: scale * array.astype(np.float64) for name, array in gradients.items()}


def _name_of_factor(pair: StepPair, scale: float) -> tuple[str, str]:
    """Returns the cause of a common factor of all gradients, and a sentence."""
    text = f"each gradient is {scale:.6g} times that of the first recording"
    replicas = pair.second.trace.num_replicas, pair.first.trace.num_replicas

    def near(number: float) -> bool:
        return abs(scale - number) < 1e-3 * number

    if replicas[0] != replicas[1] and near(replicas[0] / replicas[1]):
        return "sum_instead_of_mean", f"{text}, the number of replicas"
    if replicas[0] != replicas[1] and near(replicas[1] / replicas[0]):
        return "mean_instead_of_sum", f"{text}, one over the number of replicas"
    sizes = {pair.first.num_examples(0), pair.second.num_examples(0)} - {None}
    total = sum(pair.second.num_examples(r) or 0 for r in pair.second.replicas)
    for size in {*sizes, total}:
        if size and size > 1 and (near(size) or near(1 / size)):
            return "other_loss_reduction", f"{text}; a replica has {size} examples: sum, not mean"
    for step, which in ((pair.second, "second"), (pair.first, "first")):
        for weights in _example_weights(step):
            if near(mean := float(weights.mean())) or near(1 / mean):
                return "other_loss_reduction", (
                    f"{text}: {mean:.6g} is the mean of the weights of the examples in the {which}"
                    " recording; one script divides by their sum, the other by their number"
                )
    return "scaled_gradient", text


def _example_weights(step: RecordedStep) -> list[np.ndarray]:
    """Returns the arrays of a step that may be weights of its examples."""
    count = step.num_examples(0)
    return [
        array
        for array in step.arrays("data", 0) or []
        if array.size == count and array.dtype.kind == "f" and array.min() >= 0 < array.mean()
    ]


def _mean_of_means(
    pair: StepPair, first: Named, wrong: Sequence[str], allowed: Allowed
) -> Iterator[Explanation]:
    """Explains gradients by replicas that are averaged with equal weight.

    Replicas may have different numbers of examples, or different sums of sample weights or masks;
    the gradient of the whole batch is then another weighted sum of the sent gradients.
    """
    step = pair.second
    sent = [pair.in_first(step.gradients("raw", replica)) for replica in step.replicas]
    if len(sent) < 2 or not all(name in own for own in sent for name in first):
        return
    is_mean = step.trace.reduction == "mean"
    # Synchronized layers send gradients to other replicas; only the weights after them are
    # conclusive.
    is_coupled = any(kind_of(layer) == "batchnorm" for layer in step.trace.layers)

    def fitting(shares: Sequence[float]) -> list[str]:
        weighted = {
            name: np.sum(
                [c * own[name].astype(np.float64) for c, own in zip(shares, sent, strict=True)],
                axis=0,
            )
            for name in first
        }
        apart = distances_of(weighted, first)
        return [name for name in wrong if apart[name] <= 4 * allowed(name)]

    sizes = [step.num_examples(replica) or 0 for replica in step.replicas]
    if all(sizes) and len(set(sizes)) > 1:
        shares = [size / sum(sizes) * (1 if is_mean else len(sizes)) for size in sizes]
        right = fitting(shares)
        if len(right) == len(wrong) or (is_coupled and right):
            yield (
                "mean_of_means",
                f"the replicas have {', '.join(map(str, sizes))} examples and count equally;"
                f" weighted by their examples, the gradients of {', '.join(right[:3])} are right",
                wrong,
            )
            return
    shares = _best_shares(
        [[own[name] for name in wrong] for own in sent], [first[n] for n in wrong]
    )
    count_unequally = max(shares) - min(shares) > 1e-3 * max(map(abs, shares))
    if count_unequally and len(fitting(shares)) == len(wrong):
        usual = 1 / len(sent) if is_mean else 1.0
        listed = ", ".join(f"{share / usual:.4g}" for share in shares)
        yield (
            "mean_of_means",
            f"the replicas count equally; counted {listed} times, their gradients give that of the"
            " whole batch, as with other sums of sample weights or masks",
            wrong,
        )


def _best_shares(
    sent: Sequence[Sequence[np.ndarray]], expected: Sequence[np.ndarray]
) -> list[float]:
    """Returns the coefficients with which the sent gradients are closest to the expected one."""
    columns = [np.concatenate([a.astype(np.float64).ravel() for a in own]) for own in sent]
    target = np.concatenate([array.astype(np.float64).ravel() for array in expected])
    shares, *_ = np.linalg.lstsq(np.stack(columns, axis=1), target, rcond=None)
    return [float(share) for share in shares]


def _regularised(
    pair: StepPair,
    first: Named,
    second: Named,
    wrong: Sequence[str],
    explains: Callable[..., bool],
) -> Iterator[Explanation]:
    """Explains gradients by a term λ · weight that only one of the losses adds."""
    weights, _ = pair.states("before")
    differences = [second[n].astype(np.float64) - first[n].astype(np.float64) for n in wrong]
    decay = factor(differences, [weights[name] for name in wrong if name in weights])
    if not np.isfinite(decay) or not decay:
        return
    predicted = {
        name: array.astype(np.float64) + (decay * weights[name] if name in wrong else 0)
        for name, array in first.items()
    }
    if explains(predicted):
        which = "second" if decay > 0 else "first"
        yield (
            "regularisation_in_the_loss",
            f"the gradients of the {which} recording contain {abs(decay):.4g} · weight: a"
            " regularisation in its loss",
            wrong,
        )


def decays_equally(pair: StepPair, first: Named, second: Named, allowed: Allowed) -> bool:
    """Returns whether one script has in its loss the weight decay of the other's optimizer.

    Gradient + λ · weight is then the same in both, if the gradient without decay is not clipped.
    """
    applied = pair.applied()
    if applied is None or not all(
        norm(after[name] - before[name]) == 0
        for before, after in zip((first, second), applied, strict=True)
        for name in before
    ):
        return False
    weights, _ = pair.states("before")
    both = []
    for step, gradients in ((pair.first, first), (pair.second, second)):
        decayed = {}
        for name, gradient in gradients.items():
            rule = step.rule(name if step is pair.first else pair.in_second(name), 0)
            if rule is None or (rule.weight_decay and rule.decay_placement != IN_GRADIENT):
                return False
            decayed[name] = gradient.astype(np.float64) + rule.weight_decay * weights[name]
        both.append(decayed)
    apart = distances_of(both[1], both[0])
    return all(far <= 4 * allowed(name) for name, far in apart.items())
