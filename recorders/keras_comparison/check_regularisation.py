"""Checks the sum of `model.losses` over the replicas."""

from collections.abc import Iterator

import numpy as np

from .context import StepContext
from .distances import EPS, MARGIN, TINY
from .findings import Finding


def check_regularisation(context: StepContext) -> Iterator[Finding]:
    """Checks the sum of the replicas' regularisation."""
    losses = [own.loss for own in context.own if own.loss]
    if not context.has("loss") or not losses:
        return
    taken = sum(float(np.sum(loss[1])) for loss in context.per_replica("loss"))
    if not taken and not any(regular for _, regular in losses):
        return
    context.mark_checked()
    weights = context.sizes if context.recording.whole_loss else None
    expected = float(np.average([regular for _, regular in losses], weights=weights))
    apart = abs(taken - expected) / max(abs(expected), TINY)
    allowed = MARGIN * max(8 * EPS, *(spread.forward for spread in context.spread))
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
