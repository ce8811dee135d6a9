"""Checks a loss that is computed once from the predictions of all shards."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from lockstep.checks.losses import Losses, regular_share, with_shifted_targets
from lockstep.context import Context, Facts
from lockstep.oracles import Batch
from lockstep.verdict import Finding

# Cause, text, loss of the whole batch, and a function that returns the start of each shard's
# backward pass: its part of the gradient with respect to the predictions.
Hypothesis = tuple[str, str, float, Callable[[], list[Batch]]]


def starts_of(context: Context, data: Batch, y_pred: Batch, masks: Batch) -> list[Batch]:
    """Returns the shards' rows of the gradient of a loss with respect to the predictions."""
    gradients = context.oracle.loss_gradients(context.state(0), data, y_pred, masks)
    ends = np.cumsum(context.sizes)[:-1]
    return [list(part) for part in zip(*(np.split(g, ends) for g in gradients), strict=True)]


def check_whole_loss(context: Context, losses: Losses) -> Iterator[Finding | Facts]:
    """Checks a loss that is computed once for all shards."""
    scales = tuple((1.0, regular_share(context, shard)) for shard in context.shards)
    facts = dataclasses.replace(context.facts, scales=scales)
    size = losses.allowed * losses.size
    if context.measure("loss", "loss", 0, sum(losses.taken), losses.whole, size):
        yield facts
        return
    taken = sum(losses.taken)
    cause, text = "other_loss", f"the predictions of all replicas have {losses.whole:.6g}"
    unknown = facts.unknown | {"loss"}
    for name, why, loss, starts in _hypotheses(context, losses):
        if abs(loss - taken) <= losses.allowed * losses.size:
            cause, text, unknown = name, why, facts.unknown
            # Gradients are checked for the actual loss.
            facts = dataclasses.replace(facts, starts=tuple(starts()))
            break
    yield dataclasses.replace(facts, wrong=facts.wrong | {"loss"}, unknown=unknown)
    yield context.found(
        cause, f"the loss of the whole batch is {taken:.6g}: {text}",
        distance=losses.apart, allowed=losses.allowed,
    )  # fmt: skip


def _hypotheses(context: Context, losses: Losses) -> Iterator[Hypothesis]:
    """Yields hypotheses about a wrong loss of the whole batch."""
    yield from _means_of_shards(context, losses)
    yield from _shifted_targets(context)
    yield from _predictions_out_of_order(context)


def _means_of_shards(context: Context, losses: Losses) -> Iterator[Hypothesis]:
    """Yields means of the shards' losses: weighted by the shards' sizes, and equally."""
    by_size = [size / sum(losses.sizes) for size in losses.sizes]
    equal = [1 / len(losses.own)] * len(losses.own)
    each = f"({', '.join(f'{loss:.6g}' for loss in losses.own)}), on one device {losses.whole:.6g}"
    text = f"it is the mean of the losses of the replicas' own examples {each}"
    cause = "weighted_mean_of_means" if losses.is_plain_sum else "not_a_sum_over_examples"
    for name, why, shares in (
        (cause, text, by_size), ("mean_of_means", f"{text}; shards differ in size", equal)
    ):  # fmt: skip
        loss = sum(share * own for share, own in zip(shares, losses.own, strict=True))
        yield name, why, loss, partial(_starts_of_shards, context, shares)


def _starts_of_shards(context: Context, shares: Sequence[float]) -> list[Batch]:
    """Returns the gradients of the shards' losses with respect to their predictions."""
    arrays = zip(
        context.data, context.arrays("y_pred"), context.arrays("mask"), shares, strict=True
    )
    return [
        [share * g for g in context.oracle.loss_gradients(context.state(0), data, own, mask)]
        for data, own, mask, share in arrays
    ]


def _whole(context: Context) -> Batch:
    return [np.concatenate(parts) for parts in zip(*context.data, strict=True)]


def _shifted_targets(context: Context) -> Iterator[Hypothesis]:
    """Yields losses of targets shifted by one example."""
    y_pred, masks = context.joined("y_pred"), context.joined("mask")
    for moved in with_shifted_targets(context, _whole(context)):
        loss = context.oracle.loss(context.state(0), moved, y_pred, masks)
        text = "it is that of targets shifted by one example"
        yield "labels_shifted", text, loss, partial(starts_of, context, moved, y_pred, masks)


def _predictions_out_of_order(context: Context) -> Iterator[Hypothesis]:
    """Yields losses of the shards' predictions in other orders; one for many shards."""
    whole, num = _whole(context), len(context.shards)
    for order in itertools.permutations(range(num)) if num < 5 else [tuple(range(num))[::-1]]:
        y_pred, masks = context.joined("y_pred", order), context.joined("mask", order)
        replicas = ", ".join(map(str, order))
        yield (
            "predictions_out_of_order",
            f"it is that of predictions joined in the order of replicas {replicas}",
            context.oracle.loss(context.state(0), whole, y_pred, masks),
            partial(starts_of, context, whole, y_pred, masks),
        )
