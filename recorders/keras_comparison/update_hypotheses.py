"""Explains a wrong update."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np

from .context import StepContext
from .distances import dense, distance, factor_of, is_within, norm, ratio_of, scaled_by
from .findings import Finding
from .recorder_imports import Arrays


def why_update(
    context: StepContext, r: int, expected: Arrays, bounds: Arrays, wrong: Sequence[int]
) -> Iterator[Finding]:
    """Explains an update that differs from the optimizer's."""
    before, after, paths = (
        context.per_replica("before")[r],
        context.per_replica("after")[r],
        context.paths,
    )
    steps = [i for i in wrong if paths[i].endswith("iteration")]
    if steps:
        made = int(after[steps[0]]) - int(before[steps[0]])
        yield context.found(
            "schedule_stepped_too_often",
            f"`iterations` advances by {made} in one step, so a learning rate schedule runs"
            f" {made} times as fast", tensors=(paths[steps[0]],), replicas=(r,),
        )  # fmt: skip
    left = [i for i in wrong if i not in steps]
    while left:
        weights = [i for i in left if context.kinds[i] == "weight"] or left
        cause, text, explained = why_weights(context, r, expected, bounds, weights)
        apart = max(ratio_of(distance(after[i], expected[i]), norm(expected[i])) for i in left)
        yield context.found(
            cause, text, replicas=(r,), tensors=tuple(paths[i] for i in explained),
            distance=apart,
        )  # fmt: skip
        if context.kinds[left[0]] == "optimizer state" or cause != "changed_on_its_own":
            # A wrong weight may result from a wrong state: one explanation for both.
            left = [i for i in left if i not in explained and context.kinds[i] == "weight"]
        else:
            left = [i for i in left if i not in explained]


def why_weights(
    context: StepContext, r: int, expected: Arrays, bounds: Arrays, wrong: Sequence[int]
) -> tuple[str, str, list[int]]:
    """Returns cause, text and the explained variables, as many as one cause explains."""
    after = context.per_replica("after")[r]
    tried = [*update_hypotheses(context, r), *changes_of_update(context, r, expected, wrong)]
    for cause, text, compute in tried:
        candidate = compute()
        explained = [
            i for i in wrong
            if is_within(after[i], candidate[i], bounds[i])
            and not is_within(expected[i], candidate[i], bounds[i])
        ]  # fmt: skip
        if explained:
            return cause, text, explained
    few = {
        i: int(np.sum(~(np.abs(dense(after[i]) - dense(expected[i])) <= bounds[i]))) for i in wrong
    }
    rare = [i for i in wrong if few[i] <= max(1, np.size(after[i]) // 100)]
    if rare:
        count = sum(few[i] for i in rare)
        text = f"{count} elements differ from the update, all other elements are right"
        return "changed_on_its_own", text, rare
    return (
        "unexplained", "the optimizer makes a different update with these gradients",
        list(wrong),
    )  # fmt: skip


def update_hypotheses(
    context: StepContext, r: int
) -> Iterator[tuple[str, str, Callable[[], Arrays]]]:
    """Yields (cause, text, all variables after the optimizer's update under the hypothesis)."""
    num = len(context.replicas)
    before, sums = context.per_replica("before")[r], context.sums_of(r)
    yield "not_updated", "the weights do not change", lambda: before
    if context.has("sums") and num > 1:
        own, clips = context.per_replica(context.kind_sent)[r], context.clips_sum
        text = "the update uses the gradients of this replica, not the sum"
        yield "not_all_reduced", text, lambda: context.updated(before, own, clips=clips)
    for factor, cause in ((1 / num, "mean_instead_of_sum"), (num, "scaled_gradient")):
        scaled = [scaled_by(g, factor) for g in sums]
        text = f"the update uses {factor:.4g} times the sum"
        yield cause, text, partial(context.updated, before, scaled)
    text = "the summed gradients are clipped on this replica"
    yield "clipped_on_one_replica", text, lambda: context.updated(before, sums, clips=True)
    olds = (context.earlier(kind) for kind in ("sums", "clipped", "raw"))
    if old := next((old for old in olds if old), None):
        text = "the update uses the gradients of the previous step"
        yield "stale_gradient", text, lambda: context.updated(before, old[r])


def changes_of_update(
    context: StepContext, r: int, expected: Arrays, wrong: Sequence[int]
) -> Iterator[tuple[str, str, Callable[[], Arrays]]]:
    """Yields hypotheses with a fitted number: another learning rate, a decay."""
    before, after = context.per_replica("before")[r], context.per_replica("after")[r]
    sums = context.sums_of(r)
    twices = [context.updated(before, sums, rate=2.0, decays=decays) for decays in (True, False)]
    for chosen in [wrong, *([i] for i in wrong if len(wrong) > 1)]:
        apart = [dense(after[i]) - dense(expected[i]) for i in chosen]
        for twice, decays in zip(twices, (True, False), strict=True):
            slope = [dense(twice[i]) - dense(expected[i]) for i in chosen]
            rate = 1 + factor_of(apart, slope)
            if np.isfinite(rate):
                yield (
                    "other_learning_rate",
                    f"the learning rate is {rate:.4g} times that of the optimizer",
                    partial(context.updated, before, sums, rate=rate, decays=decays),
                )  # fmt: skip
        for base in (expected, before):
            decay = -factor_of(apart, [dense(base[i]) for i in chosen])
            if decay > 0:
                less = [dense(e) - decay * dense(b) for e, b in zip(expected, base, strict=True)]
                yield (
                    "weight_decay_on_top",
                    f"a weight decay of {decay:.3g} is applied in addition to the optimizer's"
                    " update", partial(list, less),
                )  # fmt: skip
