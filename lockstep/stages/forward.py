"""Checks each shard's predictions."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lockstep.answer.verdict import BY_DESIGN, FAULT, NOT_COMPARED, Finding
from lockstep.context import Actual, Context
from lockstep.explain.states import other_steps
from lockstep.numeric.arrays import (
    MARGIN,
    are_finite,
    joined,
    norm,
    relative_distance,
    relative_norm,
)

DRAWS_OUTSIDE = (
    "the model or its train_step draws random numbers outside of layers, so that BatchNorm over the"
    " whole batch cannot be computed on one device: predictions and gradients are not compared"
)


def check_forward(context: Context) -> Iterator[Finding | Actual]:
    """Checks predictions, and whether they depend on the other examples of a shard."""
    if not (context.computes and context.has("y_pred")):
        return
    context.mark_checked()
    for shard in context.shards:
        actual = context.arrays("y_pred")[shard]
        if shard in context.exact:
            context.measure("predictions", "y_pred", shard, actual[0], actual[0], 0.0, same=True)
            continue
        expected = context.expected(shard)
        allowed = MARGIN * expected.forward
        apart = relative_distance(actual, expected.step.y_pred)
        for got, right in zip(actual, expected.step.y_pred, strict=True):
            context.measure("predictions", "y_pred", shard, got, right, allowed * norm(right))
        if apart <= allowed:
            continue
        cause, text, changes = _why(context, shard, allowed)
        yield Actual(shard, changes)
        yield context.found(
            cause, text, kind="y_pred", items=(shard,), distance=apart, allowed=allowed,
            status=NOT_COMPARED if cause == "random_layers" else FAULT,
        )  # fmt: skip
    if len(context.shards) > 1:
        yield from _mixing(context)


def _mixing(context: Context) -> Iterator[Finding]:
    """Finds layers whose results for an example depend on the other examples of its shard."""
    oracle = context.oracle
    if not oracle.may_mix:
        return
    allowed = MARGIN * max(context.expected(shard).forward for shard in context.shards)
    if _apart(context, oracle.random_layers) <= allowed:
        return
    local = [i for i in oracle.layers_with_statistics if i not in oracle.synchronized_layers]
    statistics = [oracle.layer_names[index] for index in local]
    gradient = _gradient_apart(context)
    if statistics and _apart(context, context.modal_layers) <= allowed:
        yield context.found(
            "local_statistics",
            f"{', '.join(statistics[:3])} normalise{'s' * (len(statistics) == 1)} over each"
            " replica's examples, not over the whole batch, whose gradient differs by"
            f" {gradient:.1%}. In inference mode, shards and batch agree",
            status=BY_DESIGN, tensors=statistics, distance=gradient,
        )  # fmt: skip
    else:
        yield context.found(
            "mixes_examples",
            "the prediction for an example depends on other examples of its shard; the gradient"
            f" of the whole batch differs by {gradient:.1%}",
            status=BY_DESIGN, distance=gradient,
        )  # fmt: skip


def _apart(context: Context, off: Sequence[int]) -> float:
    """Returns the distance of predictions by shard from those of the whole batch."""

    own = context.right[0]._replace(off=tuple(off))
    shards = [own._replace(data=data) for data in context.data]
    asks = [context.together(shards)] if context.oracle.synchronized_layers else shards
    parts = joined([context.oracle.compute(ask).y_pred for ask in asks])
    whole = context.oracle.compute(own._replace(data=context.whole)).y_pred
    return relative_distance(parts, whole)


def _gradient_apart(context: Context) -> float:
    """Returns the distance of the shards' summed gradients from that of the whole batch."""
    sizes = context.sizes
    if context.oracle.synchronized_layers:
        sums = context.compute(context.together(context.right)).raw
    else:
        sums = context.weighted_sum([size / sum(sizes) for size in sizes])
    whole = context.oracle.compute(context.right[0]._replace(data=context.whole, scales=(1, 1))).raw
    if sums.keys() != whole.keys():  # A shard overflows.
        return np.nan
    return relative_norm(sums, whole)


def _why(context: Context, shard: int, allowed: float) -> tuple[str, str, Mapping[str, Any]]:
    """Returns cause, text and changes of `Ask` that explain predictions of a shard."""
    y_pred, oracle = context.arrays("y_pred")[shard], context.oracle

    def fits(**changes: Any) -> bool:
        found = oracle.compute(context.ask(shard, **changes)).y_pred
        same = [p.shape for p in found] == [p.shape for p in y_pred]
        return same and relative_distance(y_pred, found) <= allowed

    if not are_finite(y_pred) and are_finite(context.expected(shard).step.y_pred):
        return "not_finite", "predictions are NaN or infinite, and finite on one device", {}
    if oracle.synchronized_layers and fits():
        text = (
            f"BatchNorm normalises the {context.sizes[shard]} examples of each shard separately; it"
            f" is to normalise over all {sum(context.sizes)} of the batch"
        )
        return "local_statistics", text, {}
    for cause, text, changes in other_steps(context, shard):
        if fits(**changes):
            return cause, f"the predictions are {text}", changes
    if oracle.synchronized_layers and context.draws_outside:
        return "random_layers", DRAWS_OUTSIDE, {}
    return "unexplained", "one device makes other predictions for the same examples", {}
