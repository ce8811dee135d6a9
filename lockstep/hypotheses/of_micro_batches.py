"""Explains gradients by how a script accumulates those of micro-batches, and by its loss scale."""

from collections.abc import Iterator

import numpy as np

from lockstep.arithmetic import dense, scaled_all
from lockstep.context import Context
from lockstep.reference import StepPair
from lockstep.trace import Named


def factors_of_micro_batches(pair: StepPair) -> list[tuple[float, str, str]]:
    """Returns the factors of gradients that a wrong number of micro-batches or a scale gives.

    Returns:
        Factor, cause, and the reason in words.
    """
    first, second = (
        step.trace.micro_batches(step.position, 0) for step in (pair.first, pair.second)
    )
    ratios = {
        float(second): f"the loss is not divided by the {second} micro-batches of a step",
        1 / second: f"the loss is divided by the {second} micro-batches of a step twice",
        second / first: f"the loss is divided by {first}, the micro-batches of the first recording,"
        f" and a replica accumulates {second}",
        first / second: f"gradients are those of {first} micro-batches, as in the first recording,"
        f" and a replica accumulates {second}",
    }
    cause = "micro_batches_not_averaged"
    found = [(f, cause, why) for f, why in ratios.items() if f != 1]
    scale = pair.second.trace.loss_scale(pair.second.position, 0)
    if scale != 1:
        why = f"the loss scale, {scale:g}, by which they are not divided before the update"
        found.append((scale, "loss_scale_left", why))
        why = f"one over the loss scale, {scale:g}: they are divided by it without having it"
        found.append((1 / scale, "scaled_gradient", why))
    return found


def removed_gradients(pair: StepPair) -> Iterator[tuple[tuple[str, str], list[Named]]]:
    """Yields cause, text and terms of gradients that a script changes between micro-batches."""
    step, of_first = pair.second, _removed(pair.first)
    removed = pair.matching.to_first(_removed(step))
    if not removed:
        if of_first:
            text = "gradients are added that the first recording clears before the step's own ones"
            terms, before = [pair.gradients[0], of_first], pair.first.previous
            yield ("stale_gradient", text), [*terms]
            if before and pair.kept_gradients:  # The second recording adds up those of all steps.
                terms += [pair.kept_gradients, scaled_all(before.applied(0), -1.0)]
                yield ("stale_gradient", text), [*terms]
        return
    calls = step.trace.calls(step.position, 0)
    ends = [i for i, call in enumerate(calls) if call.startswith("backward")]
    between = set(calls[ends[0] : ends[-1]]) if ends else set()
    if clips := sorted(call for call in between if call.startswith("clip")):
        text = f"gradients are clipped ({clips[0].removeprefix('clip ')}) after each micro-batch"
        why = "clipped_in_each_micro_batch", f"{text}, not only their sum"
    elif "unscale" in between:
        text = "gradients are divided by the loss scale (unscale_) between the micro-batches of a"
        why = "unscaled_between_micro_batches", f"{text} step, and those after it are not"
    elif "clear" in between:
        text = f"gradients are cleared between the {len(ends)} micro-batches of a step"
        why = "lost_micro_batch", f"{text}: only those after it count"
    else:
        text = f"the script changes gradients between the {len(ends)} micro-batches of a step"
        why = "scaled_gradient", text
    terms = [pair.gradients[0], of_first, scaled_all(removed, -1.0)]
    yield why, [term for term in terms if term]


def _removed(step: Context) -> Named:
    """Returns what a script took from the gradient of the whole batch between micro-batches."""
    found = [step.trace.named(step.position, "removed", s) or {} for s in step.shards]
    if not step.has("raw"):
        return found[0]  # Sharded gradients have been summed already.
    names = dict.fromkeys(name for own in found for name in own)
    return {
        name: step.share(0) * np.sum([dense(own[name]) for own in found if name in own], axis=0)
        for name in names
    }
