"""Checks each replica's predictions."""

from collections.abc import Iterator, Sequence

import keras
import numpy as np

from .context import StepContext
from .distances import MARGIN, add, relative_distance, relative_norm
from .findings import Finding
from .modes import as_replica


def check_forward(context: StepContext) -> Iterator[Finding]:
    """Checks predictions, and whether they depend on the other examples of a shard."""
    if not context.has("y_pred"):
        return
    context.mark_checked()
    one = context.one
    for r in context.replicas:
        allowed = MARGIN * context.spread[r].forward
        apart = relative_distance(context.per_replica("y_pred")[r], context.own[r].y_pred)
        if apart > allowed:
            with as_replica(r):
                cause, text = why_forward(context, r, allowed)
            if cause == "inference_mode":
                context.in_inference.add(r)
            elif cause == "same_random_numbers":
                context.drawn_as[r] = whose_numbers(context, r, allowed)
            yield context.found(cause, text, replicas=(r,), distance=apart, allowed=allowed)
    if len(context.replicas) == 1:
        return
    allowed = MARGIN * max(spread.forward for spread in context.spread)
    if context.synchronizes or mixing(context, one.random_layers) <= allowed:
        return
    statistics = [layer.name for layer in one.layers_with_statistics]
    off = (*one.random_layers, *one.layers_with_statistics)
    gradient = gradient_apart(context)
    if statistics and mixing(context, off) <= allowed:
        yield context.found(
            "local_statistics",
            f"{', '.join(statistics[:3])} normalise{'s' * (len(statistics) == 1)} over each"
            " replica's examples, not over the whole batch, whose gradient differs by"
            f" {gradient:.1%}. In inference mode, shards and batch agree",
            design=True, tensors=tuple(statistics), distance=gradient,
        )  # fmt: skip
    else:
        yield context.found(
            "mixes_examples",
            "the prediction for an example depends on other examples of its shard; the gradient"
            f" of the whole batch differs by {gradient:.1%}",
            design=True, distance=gradient,
        )  # fmt: skip


def mixing(context: StepContext, off: Sequence[keras.layers.Layer]) -> float:
    """Returns the distance of predictions by shard from those of the whole batch."""
    one, before = context.one, context.per_replica("before")[0]

    def apart() -> float:
        shards = [one.step(before, data).y_pred for data in context.data]
        joined = [np.concatenate(parts) for parts in zip(*shards, strict=True)]
        return relative_distance(joined, one.step(before, context.whole).y_pred)

    return context.without(off, apart)


def gradient_apart(context: StepContext) -> float:
    """Returns the distance of the shards' summed gradients from the gradient of the whole batch."""
    one, before, num = context.one, context.per_replica("before")[0], sum(context.sizes)
    shards = [
        one.step(before, data, scales=(size / num, 1 / len(context.replicas))).raw
        for data, size in zip(context.data, context.sizes, strict=True)
    ]
    whole = one.step(before, context.whole).raw
    if any(len(shard) != len(whole) for shard in shards):  # One of them overflows.
        return np.nan
    return relative_norm([add(g) for g in zip(*shards, strict=True)], whole)


def why_forward(context: StepContext, replica: int, allowed: float) -> tuple[str, str]:
    """Explains predictions that differ from those for the replica's own examples."""
    one, y_pred = context.one, context.per_replica("y_pred")[replica]
    state, data = context.per_replica("before")[replica], context.data[replica]
    layers = [*one.random_layers, *one.layers_with_statistics]
    if layers:
        result = context.without(layers, lambda: one.step(state, data))
        if relative_distance(y_pred, result.y_pred) <= allowed:
            return "inference_mode", "the predictions are those of the model in inference mode"
    if (other := whose_numbers(context, replica, allowed)) != replica:
        return "same_random_numbers", f"predictions are those with the seeds of replica {other}"
    if context.follows:
        old = context.per_replica("before", context.position - 1)[replica]
        if relative_distance(y_pred, one.step(old, data).y_pred) <= allowed:
            return "stale_gradient", "the predictions are those of the previous step's weights"
    for other in context.replicas:
        if other != replica and context.sizes[other] == len(data[0]):
            result = one.step(state, context.data[other])
            if relative_distance(y_pred, result.y_pred) <= allowed:
                text = f"the predictions are those for the examples of replica {other}"
                return "same_examples", text
    return "unexplained", "one device makes other predictions for the same examples"


def whose_numbers(context: StepContext, r: int, allowed: float) -> int:
    """Returns the replica whose seeds explain the predictions of replica r; r if none does."""
    state, data = context.per_replica("before")[r], context.data[r]
    for other in context.replicas if context.one.random_layers else ():
        result = context.one.step(context.with_seeds_of(other, state), data)
        if relative_distance(context.per_replica("y_pred")[r], result.y_pred) <= allowed:
            return other
    return r
