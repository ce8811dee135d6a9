"""Checks the shards' losses, and their sum."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from lockstep.arithmetic import EPS, MARGIN, TINY, are_finite
from lockstep.checks.losses import (
    Losses,
    recorded_losses,
    regular_share,
    with_shifted_targets,
)
from lockstep.checks.whole_loss import check_whole_loss
from lockstep.context import Context, Facts
from lockstep.hypotheses.of_losses import other_losses
from lockstep.oracles import Batch
from lockstep.verdict import Finding


def check_loss(context: Context) -> Iterator[Finding | Facts]:
    """Checks the shards' losses of the recorded predictions, and their sum."""
    if not context.has("loss"):
        return
    context.mark_checked()
    if not context.computes:
        yield from _finite(context)
        return
    if len(context.facts.exact) == len(context.shards):
        for shard in context.shards:
            loss = context.arrays("loss")[shard][0]
            context.measure("loss", "loss", shard, loss, loss, 0.0, same=True)
        yield _with_scales(context, recorded_losses(context, exactly=True))
        return
    losses = recorded_losses(context)
    if context.trace.about.whole_loss:
        yield from check_whole_loss(context, losses)
        return
    if not losses.are_right and context.has("y_pred") and context.has("mask"):
        for shard in losses.odd:
            yield from _shifted_targets(context, shard, losses)
        losses = recorded_losses(context)
    size = losses.size
    context.measure("loss", "loss", 0, sum(losses.taken), losses.whole, losses.allowed * size)
    num = len(context.shards)
    if not losses.are_right and (extra := _repeated_regularisation(context, losses)) is not None:
        scales = [
            (size / sum(losses.sizes), regular_share(context, shard) + extra / num)
            for shard, size in enumerate(losses.sizes)
        ]
        yield dataclasses.replace(context.facts, scales=tuple(scales))
        yield context.found(
            "regulariser_repeated" if extra > 0 else "regulariser_missing",
            f"the replicas' losses contain {1 + extra:.4g} times the regularisation of one device",
            stage="regularisation", distance=losses.apart, allowed=losses.allowed,
        )  # fmt: skip
        return
    facts = _with_scales(context, losses)
    if losses.are_right:
        yield facts
        return
    cause, text = losses.why()
    if cause == "other_loss":
        yield facts
        for name, why, shard, known in other_losses(context, losses.odd):
            yield dataclasses.replace(known, wrong=known.wrong | {"loss"})
            yield context.found(
                name, why, items=(shard,), distance=losses.apart, allowed=losses.allowed
            )
            cause = ""
    if not cause:
        return
    unknown = {"loss"} if cause == "other_loss" else set()
    yield dataclasses.replace(
        facts, wrong=facts.wrong | {"loss"}, unknown=facts.unknown | unknown
    )  # fmt: skip
    yield context.found(
        cause, text, design=cause == "not_a_sum_over_examples", distance=losses.apart,
        allowed=losses.allowed, items=losses.odd if unknown else (),
    )  # fmt: skip


def _finite(context: Context) -> Iterator[Finding]:
    """Finds losses that are not finite, where no oracle can say whether they should be."""
    if odd := [s for s in context.shards if not are_finite(context.arrays("loss")[s])]:
        yield context.found("not_finite", "the loss is NaN or infinite", items=odd)


def _with_scales(context: Context, losses: Losses) -> Facts:
    """Returns the facts with the scales of the actual losses, even if they are wrong."""
    num = len(context.shards)
    scales = [
        (taken / own if own and np.isfinite(own) else 1 / num, regular_share(context, shard))
        for shard, (taken, own) in enumerate(zip(losses.taken, losses.own, strict=True))
    ]
    return dataclasses.replace(context.facts, scales=tuple(scales))


def _repeated_regularisation(context: Context, losses: Losses) -> float | None:
    """Returns how many times too often regularisation is in the losses; None if it is not."""
    steps = [context.expected(shard).step.loss for shard in context.shards]
    regular = [loss[1] for loss in steps if loss]
    return losses.repeated(float(np.mean(regular))) if regular else None


def _shifted_targets(context: Context, shard: int, losses: Losses) -> Iterator[Finding | Facts]:
    """Checks whether a shard's loss is that of targets of other inputs."""
    arrays: Sequence[Batch] = [context.arrays(kind)[shard] for kind in ("y_pred", "mask")]
    for moved in with_shifted_targets(context, context.data[shard]):
        loss = context.oracle.loss(context.state(shard), moved, *arrays)
        if losses.is_share(shard, loss):
            yield context.facts.with_shard(shard, used=moved)
            yield context.found(
                "labels_shifted",
                "the loss is that of targets shifted by one example relative to the inputs",
                items=(shard,),
            )
            return


def check_regularisation(context: Context) -> Iterator[Finding]:
    """Checks the sum of the shards' regularisation."""
    if not (context.computes and context.has("loss")) or context.facts.exact:
        return
    recorded = context.arrays("loss")
    losses = [loss for s in context.shards if (loss := context.expected(s).step.loss)]
    if not losses or any(len(each) < 2 for each in recorded):
        return
    taken = sum(float(np.sum(loss[1])) for loss in recorded)
    if not taken and not any(regular for _, regular in losses):
        return
    context.mark_checked()
    weights = context.sizes if context.trace.about.whole_loss else None
    expected = float(np.average([regular for _, regular in losses], weights=weights))
    apart = abs(taken - expected) / max(abs(expected), TINY)
    forward = [context.expected(shard).spread.forward for shard in context.shards]
    allowed = MARGIN * max(8 * EPS, *forward)
    if apart > allowed:
        factor = taken / expected if expected else np.inf
        cause = "regulariser_repeated" if factor > 1 else "regulariser_missing"
        mean = float(np.mean([regular for _, regular in losses]))
        if weights and abs(taken - mean) <= allowed * max(abs(mean), TINY):
            cause = "mean_of_means"  # From activity regularisers.
        yield context.found(
            cause, f"the replicas add {factor:.4g} times the regularisation of one device",
            distance=apart, allowed=allowed,
        )  # fmt: skip
