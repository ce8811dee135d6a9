"""Checks gradients that a custom step has summed before the optimizer."""

from collections.abc import Iterator

import numpy as np

from .context import StepContext
from .distances import (
    MARGIN,
    TINY,
    add,
    distance,
    factor_of,
    norm,
    relative_norm,
    same_bits,
    scaled_by,
)
from .findings import Finding
from .recorder_imports import Arrays
from .rounding import measure


def sums_in_the_step(context: StepContext) -> bool:
    """Returns whether the step sums gradients: they are equal although the examples differ."""
    raw, data = context.per_replica("raw"), context.used
    elsewhere = context.synchronizes or context.recording.whole_loss
    if elsewhere or context.in_inference or not any(map(norm, raw[0])):
        return False
    if not all(len(o) == len(raw[0]) and all(map(same_bits, o, raw[0])) for o in raw[1:]):
        return False
    if all(all(map(same_bits, other, data[0])) for other in data[1:]):
        return False
    for r in context.replicas:
        own = context.own[r].raw
        if len(own) != len(raw[0]):
            return False
        factor = factor_of(raw[0], own)
        scaled = [scaled_by(g, factor) for g in own]
        # Gradients of one replica's examples, or of a loss that does not depend on examples.
        if np.isfinite(factor) and all(context.near(r, raw[0], scaled, factor)):
            return False
    return bool(context.modal_layers) or context.loss_is_wrong or is_of_the_whole(context)


def is_of_the_whole(context: StepContext) -> bool:
    """Returns whether the replicas' gradients together are a multiple of the whole batch's."""
    total, whole, limits = total_and_whole(context)
    factor = factor_of(total, whole)
    return len(total) == len(whole) and all(
        distance(t, scaled_by(w, factor)) <= abs(factor) * limit
        for t, w, limit in zip(total, whole, limits, strict=True)
    )


def total_and_whole(context: StepContext) -> tuple[Arrays, Arrays, list[float]]:
    """Returns the sum of the sent gradients, the whole batch's gradients, and the tolerances."""
    state = context.per_replica("before")[0]
    data = [np.concatenate(parts) for parts in zip(*context.used, strict=True)]
    whole, spread = measure(context, state, data, (1.0, 1.0))
    limits = [
        MARGIN * max(own, spread.backward * norm(g)) + TINY
        for own, g in zip(spread.gradients, whole.raw, strict=True)
    ]
    return [add(g) for g in zip(*context.per_replica("raw"), strict=True)], whole.raw, limits


def check_sums_in_the_step(context: StepContext) -> Iterator[Finding]:
    """Checks gradients that the step has summed, if the whole batch is comparable."""
    if context.modal_layers or context.loss_is_wrong:
        return
    context.mark_checked()
    total, whole, limits = total_and_whole(context)
    apart = [distance(t, w) for t, w in zip(total, whole, strict=True)]
    if wrong := [i for i, limit in enumerate(limits) if apart[i] > limit]:
        yield context.found(
            "scaled_gradient",
            "the train_step sums the gradients over the replicas; the sum of what they then"
            f" send adds up to {factor_of(total, whole):.4g} times the gradient of the whole"
            " batch",
            tensors=tuple(context.recording.gradients[i] for i in wrong),
            distance=relative_norm(total, whole),
        )  # fmt: skip
