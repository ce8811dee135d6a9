"""Computes the expected values of a step, before its stages are checked."""

import numpy as np

from .context import StepContext
from .modes import as_replica
from .recorder_imports import Arrays
from .reference_model import StepResult
from .rounding import measure, repeated_spread


def compute_expected(context: StepContext) -> None:
    """Computes the step of each replica on one device."""
    sizes = context.sizes
    if context.recording.whole_loss and context.has("y_pred"):
        context.scales = [(1.0, size / sum(sizes)) for size in sizes]
        context.starts = starts_of_the_whole(context)
    if context.synchronizes:
        compute_together(context)
        return
    before, data = context.per_replica("before"), context.data
    for r in context.replicas:
        with as_replica(r):
            own, spread = measure(context, before[r], data[r], context.scales[r], context.starts[r])
        context.own.append(own)
        context.spread.append(spread)


def compute_together(context: StepContext) -> None:
    """Computes the whole batch at once, and splits its predictions by replica."""
    state, data = context.per_replica("before")[0], context.whole
    whole = context.one.step(state, data)
    spread = repeated_spread(context, whole, state, data, (1.0, 1.0))
    ends = np.cumsum(context.sizes)[:-1]
    shards = list(zip(*(np.split(p, ends) for p in whole.y_pred), strict=True))
    context.own = [StepResult(list(shard), whole.loss, whole.raw, whole.after) for shard in shards]
    context.spread = [spread] * len(context.replicas)


def starts_of_the_whole(context: StepContext) -> list[Arrays | None]:
    """Returns each replica's part of the gradient of the whole loss."""
    return starts_of(context, context.whole, context.joined("y_pred"), context.joined("mask"))


def starts_of(
    context: StepContext, data: Arrays, y_pred: Arrays, masks: Arrays
) -> list[Arrays | None]:  # fmt: skip
    """Returns the replicas' rows of the gradient with respect to the predictions."""
    before = context.per_replica("before")[0]
    gradients = context.one.loss_gradients(before, data, y_pred, masks)
    ends = np.cumsum(context.sizes)[:-1]
    return [list(part) for part in zip(*(np.split(g, ends) for g in gradients), strict=True)]
