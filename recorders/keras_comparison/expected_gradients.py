"""Computes the expected gradients of a replica."""

import numpy as np
import tensorflow as tf

from .context import StepContext
from .distances import dense, scaled_by
from .modes import as_replica
from .recorder_imports import Arrays, regularisation
from .tensors import to_numpy


def expected_gradients(
    context: StepContext, r: int, *, state: Arrays | None = None, data: Arrays | None = None,
    scales: tuple[float, float] | None = None, starts: Arrays | None = None,
) -> Arrays:  # fmt: skip
    """Returns the expected gradients of a replica: those of its part of its actual loss."""
    layers = context.modal_layers if r in context.in_inference else []
    has_loss = context.has("loss")
    if r in context.drawn_as:
        state = context.with_seeds_of(
            context.drawn_as[r], state or context.per_replica("before")[r]
        )
    with as_replica(r):
        result = context.without(
            layers,
            lambda: context.reference.step(
                state or context.per_replica("before")[r], data or context.used[r],
                scales=(scales or context.scales[r]) if has_loss else (1.0, 1.0),
                starts=starts or context.starts[r],
            ),
        )  # fmt: skip
    if has_loss:
        return result.raw
    factor, of_regular = context.scales[r]
    gradients = [scaled_by(g, factor) for g in result.raw]
    if factor == of_regular:
        return gradients
    regular = regular_gradients(
        context, state or context.per_replica("before")[r], data or context.used[r]
    )
    return [
        g if not np.any(part) else dense(g) + (of_regular - factor) * part
        for g, part in zip(gradients, regular or [], strict=True)
    ]


def regular_gradients(
    context: StepContext, state: Arrays, data: Arrays | None = None
) -> Arrays | None:
    """Returns the gradients of `model.losses`; None for variables without any."""
    if not context.one.model.losses:
        return None
    one, x = context.one, context.one.unpack(data or context.whole)[0]
    one.load(state)
    with tf.GradientTape() as tape:
        one.model(x, training=False)
        regular = regularisation(one.model)
    weights = [one.state[context.paths.index(path)] for path in context.recording.gradients]
    gradients = tape.gradient(regular, [weight.value for weight in weights])
    return [
        np.zeros(weight.shape) if g is None else dense(to_numpy(g))
        for weight, g in zip(weights, gradients, strict=True)
    ]
