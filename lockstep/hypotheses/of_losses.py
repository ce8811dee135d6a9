"""Explains a loss that is another one than that of the model."""

from collections.abc import Iterator

import numpy as np

from lockstep.arithmetic import dense, factor_of
from lockstep.context import Context, Facts
from lockstep.trace import Named

Explained = tuple[str, str, int, Facts]  # Cause, text, shard, and the facts that follow from it.


def other_losses(context: Context, shards: list[int]) -> Iterator[Explained]:
    """Yields explanations of losses, which the shards' gradients confirm."""
    for shard in shards:
        if (found := _label_smoothing(context, shard)) is not None:
            yield found


def _label_smoothing(context: Context, shard: int) -> Explained | None:
    """Explains a loss by targets that are spread over all classes, as it should not be.

    The cross-entropy with smoothing s is (1 - s) times that of the labels plus s times the mean
    over the classes; its gradients are linear in s, and give it.
    """
    if not context.has("y_pred"):
        return None
    logits, data = context.arrays("y_pred")[shard], context.facts.used[shard]
    num_inputs, _ = context.oracle.targets(data)
    targets = data[num_inputs : num_inputs + 1]
    if len(logits) != 1 or logits[0].ndim != 2 or not targets or targets[0].ndim != 1:
        return None
    labels = targets[0].astype(np.int64)
    size, classes = logits[0].shape
    if targets[0].dtype.kind not in "iu" or not size or labels.max() >= classes:
        return None
    values = logits[0].astype(np.float64)
    values -= values.max(axis=1, keepdims=True)
    logs = values - np.log(np.exp(values).sum(axis=1, keepdims=True))
    share = size / sum(context.sizes)
    scales = share, context.facts.scales[shard][1]

    def gradients(smoothing: float) -> tuple[list[np.ndarray], Named]:
        start = np.exp(logs) - smoothing / classes
        start[np.arange(size), labels] -= 1 - smoothing
        starts = [(start / size).astype(np.float32)]
        return starts, context.gradients(shard, starts=starts, scales=scales)

    actual, without, fully = context.named("raw")[shard], gradients(0.0)[1], gradients(1.0)[1]
    if actual.keys() != without.keys():
        return None
    apart = [dense(actual[name]) - dense(without[name]) for name in actual]
    smoothing = factor_of(apart, [dense(fully[n]) - dense(without[n]) for n in actual])
    if not 1e-3 < smoothing < 1:
        return None
    starts, predicted = gradients(smoothing)
    times = share / context.base_scales[shard][0]
    if len(context.near(shard, actual, predicted, times)) < len(actual):
        return None
    text = f"its gradients are those of a label smoothing of {smoothing:.3g}"
    facts = context.facts.with_shard(shard, starts=starts, scales=scales)
    return "label_smoothing", text, shard, facts
