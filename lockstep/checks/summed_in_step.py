"""Checks gradients that a custom step has summed before the optimizer."""

from collections.abc import Iterator

import numpy as np

from lockstep.arithmetic import (
    MARGIN,
    TINY,
    add_named,
    all_same_bits,
    distance,
    factor_of,
    norm,
    relative_norm,
    same_bits,
    scaled,
    scaled_all,
)
from lockstep.context import Context
from lockstep.rounding import measure
from lockstep.trace import Named
from lockstep.verdict import Finding


def is_summed_in_step(context: Context) -> bool:
    """Returns whether the step sums gradients: they are equal although the examples differ."""
    raw, data, facts = context.named("raw"), context.facts.used, context.facts
    elsewhere = context.oracle.synchronizes or context.trace.about.whole_loss
    if elsewhere or facts.off or len(raw) == 1 or not any(map(norm, raw[0].values())):
        return False
    if not all(all_same_bits(other, raw[0]) for other in raw[1:]):
        return False
    if all(all(map(same_bits, other, data[0])) for other in data[1:]):
        return False
    for shard in context.shards:
        own = context.expected(shard).step.raw
        if own.keys() != raw[0].keys():
            return False
        factor = factor_of(list(raw[0].values()), [own[name] for name in raw[0]])
        # Gradients of one shard's examples, or of a loss that does not depend on examples.
        expected = scaled_all(own, factor) if np.isfinite(factor) else {}
        if len(context.near(shard, raw[0], expected, factor)) == len(raw[0]):
            return False
    return bool(context.modal_layers) or "loss" in facts.wrong or _is_of_the_whole(context)


def _is_of_the_whole(context: Context) -> bool:
    """Returns whether the shards' gradients together are a multiple of the whole batch's."""
    total, whole, limits = _total_and_whole(context)
    factor = factor_of(list(total.values()), [whole[name] for name in total])
    return total.keys() == whole.keys() and all(
        distance(total[n], scaled(whole[n], factor)) <= abs(factor) * limits[n] for n in total
    )


def _total_and_whole(context: Context) -> tuple[Named, Named, dict[str, float]]:
    """Returns the sum of the sent gradients, the whole batch's gradients, and the tolerances."""
    ask = context.ask(0, data=context.used_by_all, scales=(1.0, 1.0), starts=None)
    weights = context.of_kind("weight", "statistic")
    whole, spread, _ = measure(
        context.oracle, ask, weights, seed=context.position, exactly=context.computes_in_float64
    )
    limits = {
        name: MARGIN * max(spread.gradients[name], spread.backward * norm(g)) + TINY
        for name, g in whole.raw.items()
    }
    return add_named(context.named("raw")), whole.raw, limits


def check_summed_in_step(context: Context) -> Iterator[Finding]:
    """Checks gradients that the step has summed, if the whole batch is comparable."""
    if context.modal_layers or "loss" in context.facts.wrong:
        return
    context.mark_checked()
    total, whole, limits = _total_and_whole(context)
    wrong = [name for name, limit in limits.items() if distance(total[name], whole[name]) > limit]
    if wrong:
        factor = factor_of(list(total.values()), [whole[name] for name in total])
        yield context.found(
            "scaled_gradient",
            "the train_step sums the gradients over the replicas; the sum of what they then send"
            f" adds up to {factor:.4g} times the gradient of the whole batch",
            tensors=wrong, distance=relative_norm(total, whole),
        )  # fmt: skip
