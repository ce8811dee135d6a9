"""Checks the sum of the replicas' losses."""

import dataclasses
from collections.abc import Iterator

import numpy as np

from .check_whole_loss import check_whole_loss
from .context import StepContext
from .distances import EPS, MARGIN
from .findings import Finding
from .losses import Losses
from .shifted_targets import with_shifted_targets


def check_loss(context: StepContext) -> Iterator[Finding]:
    """Checks the replicas' losses of the recorded predictions, and their sum."""
    if not context.has("loss"):
        return
    context.mark_checked()
    losses = recorded_losses(context)
    if context.recording.whole_loss:
        yield from check_whole_loss(context, losses)
        return
    if not losses.are_right:
        for r in losses.odd:
            yield from shifted_targets(context, r, losses)
        losses = recorded_losses(context)
    num = len(context.replicas)
    if not losses.are_right and (extra := repeated_regularisation(context, losses)) is not None:
        for r, size in enumerate(losses.sizes):
            context.scales[r] = size / sum(losses.sizes), context.regular_share(r) + extra / num
        yield dataclasses.replace(
            context.found(
                "regulariser_repeated" if extra > 0 else "regulariser_missing",
                f"the replicas' losses contain {1 + extra:.4g} times the regularisation of one"
                " device",
                distance=losses.apart, allowed=losses.allowed,
            ),
            stage="regularisation",
        )  # fmt: skip
        return
    for r, (taken, own) in enumerate(zip(losses.taken, losses.own, strict=True)):
        # Gradients are checked for each replica's own loss, even if it is wrong.
        context.scales[r] = taken / own if own else 1 / num, context.regular_share(r)
    if not losses.are_right:
        context.loss_is_wrong = True
        cause, text = losses.why()
        context.loss_is_unknown = cause == "other_loss"
        yield context.found(
            cause, text, design=cause == "not_a_sum_over_examples", distance=losses.apart,
            allowed=losses.allowed,
            replicas=tuple(losses.odd) if context.loss_is_unknown else (),
        )  # fmt: skip


def recorded_losses(context: StepContext) -> Losses:
    """Returns the recorded data losses, and those of the recorded predictions."""
    one, before = context.one, context.per_replica("before")
    y_pred, masks = context.per_replica("y_pred"), context.per_replica("mask")

    def of_shards(weighted: bool) -> list[float]:
        return [
            one.loss(before[r], context.used[r], y_pred[r], masks[r], weighted=weighted)
            for r in context.replicas
        ]

    whole = [np.concatenate(parts) for parts in zip(*context.used, strict=True)]

    def of_batch(weighted: bool) -> float:
        joined = context.joined("y_pred"), context.joined("mask")
        return one.loss(before[0], whole, *joined, weighted=weighted)

    return Losses(
        [float(np.sum(loss[0]) - np.sum(loss[1])) for loss in context.per_replica("loss")],
        of_shards(True), of_batch(True), of_shards(False), of_batch(False), context.sizes,
        MARGIN * max(8 * EPS, one.unit if one.unit > EPS else 0.0),
    )  # fmt: skip


def repeated_regularisation(context: StepContext, losses: Losses) -> float | None:
    """Returns how many times too often regularisation is in the losses; None if it is not."""
    regular = [own.loss[1] for own in context.own if own.loss]
    return losses.repeated(float(np.mean(regular))) if regular else None


def shifted_targets(context: StepContext, r: int, losses: Losses) -> Iterator[Finding]:
    """Checks whether a replica's loss is that of targets of other inputs."""
    data, arrays = context.data[r], context.arrays
    for moved in with_shifted_targets(context.one, data):
        loss = context.one.loss(arrays["before", r], moved, arrays["y_pred", r], arrays["mask", r])
        if losses.is_share(r, loss):
            context.used[r] = moved
            yield context.found(
                "labels_shifted",
                "the loss is that of targets shifted by one example relative to the inputs",
                replicas=(r,),
            )
            return
