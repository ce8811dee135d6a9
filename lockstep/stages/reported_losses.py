"""Compares the losses that scripts report with those of another recording."""

from collections.abc import Iterator

from lockstep.answer.verdict import Finding
from lockstep.explain.loss_values import (
    agree_in_value,
    differ_by_replicas,
    losses_of,
    means_of_replicas,
)
from lockstep.reference import StepPair


def compare_losses(pair: StepPair) -> Iterator[Finding]:
    """Compares the loss of the whole batch: the sum, mean or weighted mean of the shards' losses.

    Scripts report losses in different forms, which do not affect the training: any form of one
    recording may agree with any form of the other.
    """
    first, second, allowed = losses_of(pair.first), losses_of(pair.second), pair.tolerance.of_batch
    if not (pair.computes_the_same and first and second):
        return
    pair.second.mark_checked("loss")
    if agree_in_value(pair) or (pair.are_gradients_right and differ_by_replicas(pair)):
        return
    if pair.second.kind_of_loss == "objective" and not _shows_in_all_gradients(pair):
        return
    times = second[0] / first[0] if first[0] else float("nan")
    sizes = {size for step, _ in pair.both for size in step.sizes[:1]} - {0, 1}
    is_sum = any(min(abs(times - size) / size, abs(times * size - 1)) < 1e-3 for size in sizes)
    cause = "other_loss"
    nearest = min(second, key=lambda loss: abs(loss - first[0]))
    text = f"the loss is {nearest:.6g}, and {first[0]:.6g} in the first recording"
    if is_sum:
        cause = "other_loss_reduction"
        text += f": {times:.6g} times, a sum over examples in place of a mean"
    elif why := means_of_replicas(pair):
        cause, text = "mean_of_means", f"{text}: {why}"
    finding = pair.second.found("loss", cause, text, distance=abs(times - 1), allowed=allowed)
    yield pair.explained(finding) if cause == "other_loss" else finding


def _shows_in_all_gradients(pair: StepPair) -> bool:
    """Returns whether all gradients differ, as those of another loss do.

    What a step differentiates may be the loss of a part of the batch: a script can compute the
    others by copies of the model that are not recorded, and add the gradients itself.
    """
    names = pair.gradients.names
    return not names or len(pair.different_gradients) == len(names)
