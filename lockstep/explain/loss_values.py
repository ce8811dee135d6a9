"""The losses that scripts compute, in the forms in which they may report that of a batch."""

import itertools
from collections.abc import Sequence

import numpy as np

from lockstep.context import Context
from lockstep.explain.pairing import parts_of
from lockstep.explain.targets import NO_TARGET
from lockstep.numeric.arrays import (
    add_named,
    dense,
    factor_of,
    is_far,
)
from lockstep.reference import StepPair

_CLOSE = 1e-3  # Of numbers that are whole.


def agree_in_value(pair: StepPair) -> bool:
    """Returns whether the loss of the whole batch is known in both, and in some form the same.

    Scripts report losses in different forms, which do not affect the training. Those of steps that
    overflow are not finite.
    """
    allowed, losses = pair.tolerance.of_batch, [losses_of(s) for s in (pair.first, pair.second)]
    return any(
        abs(a - b) <= allowed * abs(a) or not (np.isfinite(a) or np.isfinite(b))
        for a, b in itertools.product(*losses)
    )


def differ_by_replicas(pair: StepPair) -> bool:
    """Returns whether the losses of the whole batch have a factor of the numbers of replicas.

    Of a loss over gathered outputs, of which only the own ones have a gradient, each replica
    differentiates as many times the loss as there are replicas. Its gradients show whether it does.
    """
    first, second = (step.trace.about.num_replicas for step, _ in pair.both)
    times, allowed = second / first, pair.tolerance.of_batch
    losses = itertools.product(*map(losses_of, (pair.first, pair.second)))
    return any(abs(by * a - b) <= allowed * abs(b) for a, b in losses for by in (times, 1 / times))


def means_of_replicas(pair: StepPair) -> str:
    """Returns a sentence if the loss is the mean of the means over each replica's words; else "".

    Of a cross-entropy, outputs and the gradient of the loss by them give the targets, which of
    them count, and so the loss of each replica: also where a step divides after its backward pass.
    """
    own, right = _cross_entropies(pair.second), _cross_entropies(pair.first)
    counts = [number for _, number in own]
    if len(own) < 2 or len({*counts}) < 2 or not all(counts) or not right:
        return ""
    mean = float(np.mean([total / number for total, number in own]))
    whole = sum(total for total, _ in right) / sum(number for _, number in right)
    allowed = pair.tolerance.of_batch
    fits = [
        any(abs(loss - known) <= allowed * abs(known) for loss in losses_of(step))
        for step, known in ((pair.first, whole), (pair.second, mean))
    ]
    if not all(fits) or abs(mean - whole) <= 2 * allowed * abs(whole):
        return ""
    return f"the mean of the replicas' means over {', '.join(map(str, counts))} words or examples"


def other_penalty(pair: StepPair) -> tuple[str, str] | None:
    """Returns cause and sentence if a model's penalties count another number of times in the loss.

    Of recordings that have the loss that is differentiated, and each replica's share of the
    model's penalties beside it, as of outputs of a layer, whose gradient is not known.
    """
    kinds, num = {step.kind_of_loss for step, _ in pair.both}, len(pair.second.shards)
    if kinds != {"objective"} or len(pair.first.shards) > 1 or not pair.has("objective"):
        return None
    first, second = (
        [[float(np.sum(np.float64(a))) for a in arrays] for arrays in step.arrays("objective")]
        for step in (pair.first, pair.second)
    )
    if any(len(arrays) != 2 for arrays in (*first, *second)) or not first[0][1]:
        return None
    (whole, penalty), allowed = first[0], pair.tolerance.of_batch
    total, own = (sum(each[i] for each in second) for i in (0, 1))
    of_rounding = allowed * (abs(whole) + abs(total)) / abs(penalty)
    if of_rounding > _CLOSE:
        return None
    more = [1 + (share * total - whole) / penalty for share in (1.0, 1 / num)]
    if any(abs(times - 1) <= of_rounding for times in more):
        return None
    shown = f"the penalties of the model's layers are {own:.6g}, and {penalty:.6g} in the first"
    ratio = own / penalty
    is_sum = any(abs(ratio - size) <= _CLOSE for size in pair.second.sizes if size > 1)
    for times in more:
        if abs(ratio - 1) > _CLOSE:
            if abs(times - ratio) <= of_rounding and is_sum:
                return "other_loss_reduction", f"{shown} recording: a sum over examples"
        elif abs(times - num) <= of_rounding:
            return "regulariser_repeated", (
                f"the sum of the replicas' losses contains {times:.4g} times the penalties of the"
                f" model's layers, {penalty:.6g}"
            )
        elif abs(times) <= of_rounding:
            return "regulariser_missing", (
                f"the loss lacks the penalties of the model's layers, {penalty:.6g}, which that of"
                " the first recording contains"
            )
    return None


def _cross_entropies(step: Context) -> list[tuple[float, int]]:
    """Returns the sum of losses and their number, of each shard; empty if they are not known."""
    found = dict.fromkeys(step.shards, (0.0, 0))
    for part in parts_of(step):
        outputs = part.arrays["y_pred"]
        if len(outputs) != 1 or any(part.smoothings) or len(part.arrays["targets"]) != 1:
            return []
        logits = dense(outputs[0]).reshape(-1, outputs[0].shape[-1])
        targets = part.arrays["targets"][0].ravel()
        if targets.size != len(logits) or logits.shape[1] < 2:
            return []
        counted = targets != NO_TARGET
        logits, targets = logits[counted], targets[counted].astype(int)
        most = logits.max(1)
        logs = most + np.log(np.exp(logits - most[:, None]).sum(1))
        loss = float(np.sum(logs - np.take_along_axis(logits, targets[:, None], 1)[:, 0]))
        total, number = found[part.shard]
        found[part.shard] = total + loss, number + int(counted.sum())
    return [*found.values()]


def agree_in_each_step(pair: StepPair) -> bool:
    """Returns whether the losses of all steps agree that start from the same state."""
    return all(agree_in_value(each) for each in pair.steps() if each.starts_equally)


def are_of_whole_batch(pair: StepPair) -> bool:
    """Returns whether each replica differentiates the loss of the whole batch, not of its part."""
    first, second = pair.first, pair.second
    is_reported = second.trace.about.framework == "jax"  # What is differentiated is not recorded.
    if is_reported or not second.has("loss") or len(second.shards) < 2:
        return False
    allowed, whole = pair.tolerance.of_batch, losses_of(first)
    own = [float(np.sum(np.float64(x))) for losses in second.arrays("loss") for x in losses[:1]]
    return len(own) == len(second.shards) and all(
        any(abs(loss - right) <= allowed * abs(right) for right in whole) for loss in own
    )


def losses_of(context: Context) -> list[float]:
    """Returns the loss of the whole batch in each form that a script may report."""
    kind = context.kind_of_loss
    if not context.has(kind) or not all(context.arrays(kind)):
        return []
    losses = [[float(np.sum(np.float64(a))) for a in arrays] for arrays in context.arrays(kind)]
    times = {1.0, _factor_by_hand(context)}
    forms = [[each[0] for each in losses]]
    # The second array is a part of the first: the regularisation of Keras, or losses whose
    # gradients a script has cleared.
    if all(len(each) > 1 for each in losses):
        forms.append([each[0] - each[1] for each in losses])
    forms += _of_ranks(context, forms[0])
    found = []
    for per_shard in forms:
        found += [float(np.mean(per_shard)), float(np.sum(per_shard))]
        if all(context.sizes):
            found.append(float(np.average(per_shard, weights=context.sizes)))
    return [factor * loss for factor in times for loss in found]


def _of_ranks(context: Context, losses: Sequence[float]) -> list[list[float]]:
    """Returns mean and sum of the losses of each shard's ranks, if these have other parts of it."""
    forms: list[list[float]] = [[], []]
    for shard, loss in enumerate(losses):
        views = context.trace.views(context.position, context.kind_of_loss, shard, 0)
        own = [float(np.sum(np.float64(view))) for view in views.values()]
        own = own if own and is_far(max(own), min(own)) else [loss]
        forms[0].append(float(np.mean(own)))
        forms[1].append(float(np.sum(own)))
    return [form for form in forms if form != losses]


def _factor_by_hand(context: Context) -> float:
    """Returns the factor by which a script multiplies its gradients, in place of its loss; or 1."""
    changed, name = context.changed_by_hand, "sums" if context.has("sums") else "raw"
    if not changed or not context.has(name):
        return 1.0
    own = add_named(context.named(name))
    names = [n for n in changed if n in own]
    factor = factor_of([changed[n] for n in names], [own[n] for n in names])
    is_factor = factor > 0 and not any(is_far(changed[n], factor * dense(own[n])) for n in names)
    return factor * len(context.named(name)) if is_factor else 1.0
