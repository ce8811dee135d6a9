"""Checks the sum of the gradients against the gradient of the whole batch."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from lockstep.arithmetic import (
    MARGIN,
    TINY,
    add_named,
    dense,
    distance,
    factor_of,
    norm,
    relative_norm,
    scaled,
    scaled_all,
)
from lockstep.context import Context
from lockstep.rounding import repeated_spread
from lockstep.trace import Named
from lockstep.verdict import Finding

Limits = Mapping[str, float]


def check_whole_batch(context: Context) -> Iterator[Finding]:
    """Compares the sum over the shards with the gradient of the whole batch."""
    if len(context.shards) == 1 or context.facts.wrong & {"loss", "forward"}:
        return
    if not context.oracle.may_mix and context.has("loss"):
        return  # The loss is a sum over examples, and each shard's part of it is right.
    state, off, facts = context.state(0), context.modal_layers, context.facts
    regular = sum(scale for _, scale in facts.scales) if context.has("loss") else 1.0
    ask = context.ask(
        0, state=state, data=context.used_by_all, scales=(1.0, regular), starts=None, off=off
    )
    shards = [context.gradients(s, state=state, off=off) for s in context.shards]
    result = context.compute(ask)
    whole = result.raw
    if any(shard.keys() != whole.keys() for shard in shards):  # One of them overflows.
        return
    sums, spreads = add_named(shards), [context.expected(s).spread for s in context.shards]
    backward = max(spread.backward for spread in spreads)
    # The shards' gradients may cancel each other, but not their rounding errors.
    limits = {
        name: MARGIN
        * max(
            sum(spread.gradients.get(name, 0.0) for spread in spreads),
            backward * sum(norm(shard[name]) for shard in shards),
        )
        + TINY
        for name in whole
    }
    apart = {name: distance(sums[name], whole[name]) for name in whole}
    if any(apart[name] > limits[name] for name in whole):
        rounded = context.of_kind("weight", "statistic")
        own = result if not context.computes_in_float64 else context.oracle.compute(ask)
        spread = repeated_spread(context.oracle, own, ask, rounded, context.position)
        limits = {n: limit + MARGIN * spread.gradients[n] for n, limit in limits.items()}
    if wrong := [name for name, limit in limits.items() if apart[name] > limit]:
        cause, text = _why(context, sums, whole, limits, wrong)
        # Losses may be equal by chance when their gradients are not.
        stage = "loss" if cause == "weighted_mean_of_means" else ""
        yield context.found(
            cause, text, tensors=wrong, distance=relative_norm(sums, whole), stage=stage,
            design=cause == "not_a_sum_over_examples",
        )  # fmt: skip


def _why(
    context: Context, sums: Named, whole: Named, limits: Limits, wrong: Sequence[str]
) -> tuple[str, str]:
    """Explains why the shards' gradients do not add up to the gradient of the whole batch."""
    explained = _weighted(context, whole, limits, wrong)
    if explained := explained or _by_factor(context, sums, whole, limits, wrong):
        return explained
    if regular := context.oracle.regular_gradients(context.state(0), context.used_by_all):
        apart = [dense(sums[name]) - dense(whole[name]) for name in wrong]
        extra = factor_of(apart, [regular[name] for name in wrong])
        if all(
            distance(sums[n], dense(whole[n]) + extra * dense(regular[n])) <= limits[n]
            for n in wrong
        ):
            return (
                "regulariser_repeated" if extra > 0 else "regulariser_missing",
                f"the replicas' gradients contain {1 + extra:.4g} times the regularisation of one"
                " device",
            )
    return (
        "not_a_sum_over_examples",
        f"the gradient of the whole batch differs by {relative_norm(sums, whole):.1%} from the sum"
        " over the shards, also on one device",
    )


def _weighted(
    context: Context, whole: Named, limits: Limits, wrong: Sequence[str]
) -> tuple[str, str] | None:
    """Explains the sum by equal weights of unequal shards."""

    def are_whole(weights: Sequence[float]) -> bool:
        candidate = _weighted_sum(context, weights)
        return all(distance(candidate[name], whole[name]) <= limits[name] for name in wrong)

    sizes = context.sizes
    by_size = [size / sum(sizes) for size in sizes]
    if not context.has("loss") and len(set(sizes)) > 1 and are_whole(by_size):
        text = f"shards of {'/'.join(map(str, sizes))} examples have equal weights"
        return "mean_of_means", text
    if (weights := _weights_of_shards(context)) and are_whole(weights):
        shown = "/".join(f"{weight:.3g}" for weight in weights)
        return "weighted_mean_of_means", (
            "shards have equal weights; their shares of the sample weights, or unmasked steps, are"
            f" {shown}"
        )
    return None


def _by_factor(
    context: Context, sums: Named, whole: Named, limits: Limits, wrong: Sequence[str]
) -> tuple[str, str] | None:
    """Explains the sum by a factor."""
    factor = factor_of([sums[n] for n in whole], list(whole.values()))
    if not all(
        distance(sums[n], scaled(whole[n], factor)) <= abs(factor) * limits[n] for n in wrong
    ):
        return None
    times = (
        f"the sum of the gradients over {len(context.shards)} replicas is {factor:.4g} times the"
        " gradient of the whole batch"
    )
    if factor < 1:
        return "scaled_gradient", f"{times}: the loss is divided more than once"
    return "scalar_loss_not_divided", (
        f"{times}: the loss is the mean over a replica's examples, not divided by the number of"
        " replicas"
    )


def _weights_of_shards(context: Context) -> list[float]:
    """Returns the fractions of the shards' sample weights, or of their unmasked steps."""
    if not context.has("mask"):
        return []
    sums = []
    for shard in context.shards:
        arrays = [mask for mask in context.arrays("mask")[shard] if mask.ndim]
        arrays += context.oracle.targets(context.facts.used[shard])[1]
        sums.append(sum(float(np.sum(array)) for array in arrays))
    return [number / sum(sums) for number in sums] if sum(sums) else []


def _weighted_sum(context: Context, weights: Sequence[float]) -> Named:
    """Returns the sum of the shards' gradients, each multiplied by a weight."""
    regular, has_loss = 1 / len(context.shards), context.has("loss")
    shares = []
    for shard, weight in enumerate(weights):
        if context.sizes[shard] == 0:
            continue
        scales = (weight, regular) if has_loss else (1.0, 1.0)
        ask = context.ask(
            shard, state=context.state(0), scales=scales, off=context.modal_layers, starts=None
        )
        raw = context.compute(ask).raw
        shares.append(raw if has_loss else scaled_all(raw, weight))
    return add_named(shares)
