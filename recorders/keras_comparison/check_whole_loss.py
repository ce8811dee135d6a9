"""Checks a loss that is computed once from the predictions of all replicas."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from .context import StepContext
from .expected_step import starts_of
from .findings import Finding
from .losses import Losses
from .recorder_imports import Arrays
from .shifted_targets import with_shifted_targets

# Cause, text, loss of the whole batch, and a function that returns the start of each replica's
# backward pass: its part of the gradient with respect to the predictions.
Hypothesis = tuple[str, str, float, Callable[[], list[Arrays | None]]]


def check_whole_loss(context: StepContext, losses: Losses) -> Iterator[Finding]:
    """Checks a loss that is computed once for all replicas."""
    context.scales = [(1.0, context.regular_share(r)) for r in context.replicas]
    if losses.apart <= losses.allowed:
        return
    context.loss_is_wrong = True
    taken = sum(losses.taken)
    context.loss_is_unknown = True
    cause, text = "other_loss", f"the predictions of all replicas have {losses.whole:.6g}"
    for name, why, loss, starts in loss_hypotheses(context, losses):
        if abs(loss - taken) <= losses.allowed * losses.size:
            context.loss_is_unknown, cause, text = False, name, why
            context.starts = starts()  # Gradients are checked for the actual loss.
            break
    yield context.found(
        cause, f"the loss of the whole batch is {taken:.6g}: {text}",
        distance=losses.apart, allowed=losses.allowed,
    )  # fmt: skip


def loss_hypotheses(context: StepContext, losses: Losses) -> Iterator[Hypothesis]:
    """Yields hypotheses about a wrong loss of the whole batch."""
    yield from _means_of_shards(context, losses)
    yield from _shifted_targets(context)
    yield from _predictions_out_of_order(context)


def _means_of_shards(context: StepContext, losses: Losses) -> Iterator[Hypothesis]:
    """Yields means of the replicas' losses: weighted by the shards' sizes, and equally."""
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


def _starts_of_shards(context: StepContext, shares: Sequence[float]) -> list[Arrays | None]:
    """Returns the gradients of the replicas' losses with respect to their predictions."""
    before, y_pred = context.per_replica("before")[0], context.per_replica("y_pred")
    arrays = zip(context.data, y_pred, context.per_replica("mask"), shares, strict=True)
    return [
        [share * g for g in context.one.loss_gradients(before, data, own, mask)]
        for data, own, mask, share in arrays
    ]


def _shifted_targets(context: StepContext) -> Iterator[Hypothesis]:
    """Yields losses of targets shifted by one example."""
    one, before = context.one, context.per_replica("before")[0]
    y_pred, masks = context.joined("y_pred"), context.joined("mask")
    for moved in with_shifted_targets(one, context.whole):
        loss = one.loss(before, moved, y_pred, masks)
        text = "it is that of targets shifted by one example"
        yield "labels_shifted", text, loss, partial(starts_of, context, moved, y_pred, masks)


def _predictions_out_of_order(context: StepContext) -> Iterator[Hypothesis]:
    """Yields losses of the replicas' predictions in other orders; one for many replicas."""
    one, before, whole = context.one, context.per_replica("before")[0], context.whole
    num = len(context.replicas)
    for order in itertools.permutations(range(num)) if num < 5 else [range(num)[::-1]]:
        y_pred, masks = context.joined("y_pred", order), context.joined("mask", order)
        replicas = ", ".join(map(str, order))
        yield (
            "predictions_out_of_order",
            f"it is that of predictions joined in the order of replicas {replicas}",
            one.loss(before, whole, y_pred, masks),
            partial(starts_of, context, whole, y_pred, masks),
        )
