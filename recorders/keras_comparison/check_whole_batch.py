"""Checks the sum of the gradients against the gradient of the whole batch."""

import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from .context import StepContext
from .distances import MARGIN, TINY, add, dense, distance, factor_of, norm, relative_norm, scaled_by
from .expected_gradients import expected_gradients, regular_gradients
from .findings import Finding
from .modes import as_replica
from .recorder_imports import Arrays, leaves
from .reference_model import StepResult
from .rounding import repeated_spread


def check_whole_batch(context: StepContext) -> Iterator[Finding]:
    """Compares the sum over the replicas with the gradient of the whole batch."""
    if len(context.replicas) == 1 or context.loss_is_wrong:
        return
    before = context.per_replica("before")[0]
    data = [np.concatenate(parts) for parts in zip(*context.used, strict=True)]
    regular = (1.0, sum(scale for _, scale in context.scales) if context.has("loss") else 1.0)

    def sums_and_whole() -> tuple[list[Arrays], StepResult]:
        shards = [expected_gradients(context, r, state=before) for r in context.replicas]
        return shards, context.reference.step(before, data, scales=regular)

    shards, result = context.without(context.modal_layers, sums_and_whole)
    whole = result.raw
    if any(len(shard) != len(whole) for shard in shards):  # One of them overflows.
        return
    sums = [add(g) for g in zip(*shards, strict=True)]
    backward = max(spread.backward for spread in context.spread)
    # The shards' gradients may cancel each other, but not their rounding errors.
    sizes = [sum(map(norm, parts)) for parts in zip(*shards, strict=True)]
    limits = [
        MARGIN * max(sum(s.gradients[i] for s in context.spread), backward * size) + TINY
        for i, size in enumerate(sizes)
    ]  # fmt: skip
    apart = [distance(a, b) for a, b in zip(sums, whole, strict=True)]
    if any(a > limit for a, limit in zip(apart, limits, strict=True)):
        spread = context.without(
            context.modal_layers, partial(repeated_spread, context, result, before, data, regular)
        )
        limits = [limit + MARGIN * g for limit, g in zip(limits, spread.gradients, strict=True)]
    wrong = [i for i, limit in enumerate(limits) if apart[i] > limit]
    if wrong:
        cause, text = why_not_additive(context, sums, whole, limits, wrong)
        found = context.found(
            cause, text, tensors=tuple(context.recording.gradients[i] for i in wrong),
            distance=relative_norm(sums, whole), design=cause == "not_a_sum_over_examples",
        )  # fmt: skip
        # Losses may be equal by chance when their gradients are not.
        is_loss = cause == "weighted_mean_of_means"
        yield dataclasses.replace(found, stage="loss") if is_loss else found


def why_not_additive(
    context: StepContext, sums: Arrays, whole: Arrays, limits: Sequence[float], wrong: Sequence[int]
) -> tuple[str, str]:
    """Explains why the replicas' gradients do not add up to the gradient of the whole batch."""
    explained = _why_weighted(context, whole, limits, wrong) or _why_scaled(
        context, sums, whole, limits, wrong
    )
    if explained:
        return explained
    if regular := regular_gradients(context, context.per_replica("before")[0]):
        extra = factor_of(
            [dense(sums[i]) - dense(whole[i]) for i in wrong], [regular[i] for i in wrong]
        )
        if all(distance(sums[i], dense(whole[i]) + extra * regular[i]) <= limits[i] for i in wrong):
            return (
                "regulariser_repeated" if extra > 0 else "regulariser_missing",
                f"the replicas' gradients contain {1 + extra:.4g} times the regularisation of"
                " one device",
            )
    return (
        "not_a_sum_over_examples",
        f"the gradient of the whole batch differs by {relative_norm(sums, whole):.1%} from the"
        " sum over the shards, also on one device",
    )


def _why_weighted(
    context: StepContext, whole: Arrays, limits: Sequence[float], wrong: Sequence[int]
) -> tuple[str, str] | None:
    """Explains the sum by equal weights of unequal shards."""

    def are_whole(candidate: Arrays) -> bool:
        return all(distance(candidate[i], whole[i]) <= limits[i] for i in wrong)

    sizes = context.sizes
    if not context.has("loss") and len(set(sizes)) > 1:
        total = sum(sizes)
        if are_whole(weighted_sum(context, [size / total for size in sizes])):
            text = f"shards of {'/'.join(map(str, sizes))} examples have equal weights"
            return "mean_of_means", text
    if (weights := weights_of_shards(context)) and are_whole(weighted_sum(context, weights)):
        shown = "/".join(f"{weight:.3g}" for weight in weights)
        text = (
            "shards have equal weights; their shares of the sample weights, or unmasked steps,"
            f" are {shown}"
        )
        return "weighted_mean_of_means", text
    return None


def _why_scaled(
    context: StepContext, sums: Arrays, whole: Arrays, limits: Sequence[float], wrong: Sequence[int]
) -> tuple[str, str] | None:
    """Explains the sum by a factor."""
    factor = factor_of(sums, whole)
    if not all(
        distance(sums[i], scaled_by(whole[i], factor)) <= abs(factor) * limits[i] for i in wrong
    ):
        return None
    times = (
        f"the sum of the gradients over {len(context.replicas)} replicas is {factor:.4g} times the"
        " gradient of the whole batch"
    )
    if factor < 1:
        return "scaled_gradient", f"{times}: the loss is divided more than once"
    return (
        "scalar_loss_not_divided",
        f"{times}: the loss is the mean over a replica's examples, not divided by the"
        " number of replicas",
    )


def weights_of_shards(context: StepContext) -> list[float]:
    """Returns the fractions of the shards' sample weights, or of their unmasked steps."""
    if not context.has("mask"):
        return []
    sums = []
    for r in context.replicas:
        arrays = [mask for mask in context.per_replica("mask")[r] if mask.ndim]
        arrays += [np.asarray(w) for w in leaves(context.one.unpack(context.used[r])[2])]
        sums.append(sum(float(np.sum(array)) for array in arrays))
    return [number / sum(sums) for number in sums] if sum(sums) else []


def weighted_sum(context: StepContext, weights: Sequence[float]) -> Arrays:
    """Returns the sum of the shards' gradients, each multiplied by a weight."""
    before, regular = context.per_replica("before")[0], 1 / len(context.replicas)
    shares = []
    for r, (data, weight) in enumerate(zip(context.used, weights, strict=True)):
        if len(data[0]) == 0:
            continue
        has_loss = context.has("loss")
        scales = (weight, regular) if has_loss else (1.0, 1.0)
        with as_replica(r):
            step = partial(context.reference.step, before, data, scales=scales)
            raw = context.without(context.modal_layers, step).raw
        shares.append(raw if has_loss else [scaled_by(g, weight) for g in raw])
    return [add(g) for g in zip(*shares, strict=True)]
