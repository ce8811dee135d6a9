"""Explains a loss that is another one than that of the model."""

from collections.abc import Iterator

import numpy as np

from lockstep.context import Context, Facts

Explained = tuple[str, str, int, Facts]  # Cause, text, shard, and the facts that follow from it.


def other_losses(context: Context, shards: list[int]) -> Iterator[Explained]:
    """Yields explanations of losses, which the shards' gradients confirm."""
    for shard in shards:
        if (found := _label_smoothing(context, shard)) is not None:
            yield found


def _label_smoothing(context: Context, shard: int) -> Explained | None:
    """Explains a loss by targets that are spread over all classes, as it should not be.

    The cross-entropy with smoothing s is (1 - s) times that of the labels plus s times the mean
    over the classes; the logits and the loss give s.
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
    of_labels, evenly = -logs[np.arange(size), labels].mean(), -logs.mean()
    share = size / sum(context.sizes)
    taken = float(np.sum(context.arrays("loss")[shard][0])) / share
    smoothing = (taken - of_labels) / (evenly - of_labels) if evenly != of_labels else 0.0
    if not 1e-3 < smoothing < 1:
        return None
    start = np.exp(logs) - smoothing / classes
    start[np.arange(size), labels] -= 1 - smoothing
    starts = [(start / size).astype(np.float32)]
    scales = share, context.facts.scales[shard][1]
    predicted = context.gradients(shard, starts=starts, scales=scales)
    actual = context.named("raw")[shard]
    if len(context.near(shard, actual, predicted, share / context.base_scales[shard][0])) < len(
        actual
    ):
        return None
    text = f"its loss and gradients are those of a label smoothing of {smoothing:.3g}"
    facts = context.facts.with_shard(shard, starts=starts, scales=scales)
    return "label_smoothing", text, shard, facts
