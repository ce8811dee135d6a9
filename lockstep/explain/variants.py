"""What differs before the backward pass of two trainings: losses, layers, dtypes."""

from collections.abc import Sequence

import numpy as np

from lockstep.answer.text import count, first_names
from lockstep.answer.verdict import FAULT, NOT_COMPARED, Finding
from lockstep.context import Context
from lockstep.data.trace import Trace
from lockstep.explain.axes import unlike_on_axes
from lockstep.explain.drawn import OF_MODEL, other_draws
from lockstep.explain.layers import (
    inference_by_statistics,
    num_local_norms,
    other_settings,
)
from lockstep.explain.loss_values import agree_in_value, means_of_replicas, other_penalty
from lockstep.explain.losses import other_form, weights_of_losses
from lockstep.explain.pairing import have_equal_outputs, matched_examples
from lockstep.explain.random_layers import draws, draws_other_numbers, is_random
from lockstep.explain.replica_statistics import normalised_apart
from lockstep.explain.solve import solve
from lockstep.numeric.arrays import EPS, MARGIN, UNITS
from lockstep.reference import StepPair


def differ_by_layers(pair: StepPair) -> bool:
    """Returns whether the outputs of a right training would differ, too."""
    causes = other_layers(pair)
    return bool(causes) and all(status != FAULT for *_, status in causes)


def other_settings_of(pair: StepPair, wrong: Sequence[str], where: str = "") -> list[Finding]:
    """Returns what differs before the backward pass: in the loss, or in the layers.

    Args:
        pair: the step.
        wrong: names of the wrong gradients.
        where: a sentence on the part that is wrong; "" if it is not known.
    """
    earlier = [each for each in pair.findings if each.stage in ("forward", "loss")]
    known = [each for each in earlier if each.detail != "unexplained"]
    causes = [(each.detail, each.text, each.status) for each in known]
    if not causes and (text := _other_dtypes(pair)):
        causes = [("reduced_precision", text, FAULT)]
    causes = causes or other_layers(pair)
    if causes and all(status != FAULT for *_, status in causes):
        others = weights_of_losses(pair)
        if text := other_form(pair):
            others.append(("other_loss", text))
        causes = [(*why, FAULT) for why in others] or causes
    if not causes and (text := means_of_replicas(pair)):
        causes = [("mean_of_means", f"the loss is {text}", FAULT)]
    if not causes and (why := other_penalty(pair)):
        causes = [(*why, FAULT)]
    if not causes and (text := unlike_on_axes(pair, wrong)):
        causes = [("partial_not_reduced", text, FAULT)]
    if not causes:
        num, cause = len(pair.gradients.names), "unexplained"
        text = f"{len(wrong)} of {num} gradients differ, and no known cause explains it"
        if where:
            text += f": {where}"
        if pair.has("data", "y_pred", "y_grad") and not earlier and _are_all_compared(pair):
            agree = "outputs, and the gradients of the loss by them, agree"
            text += (
                f"; {agree}: it is in another part of the loss, in the backward pass or after it"
            )
            if _are_of_backward(pair):
                at = "when the backward pass leaves them"
                if not pair.gradients.raw:  # A step may add over devices itself.
                    at = "after the backward pass and the sum over devices"
                text = f"{len(wrong)} of {num} gradients differ {at}; the loss, {agree}"
                text += f": {where}" if where else ""
                cause = "other_backward"
        causes.append((cause, text, FAULT))
    return [
        pair.second.found("gradients", cause, text, tensors=wrong, status=status)
        for cause, text, status in causes
    ]


def _are_of_backward(pair: StepPair) -> bool:
    """Returns whether the loss agrees, and what the one backward pass leaves is what is applied.

    A step in JAX has no calls. Where only sums are recorded, those over devices belong to it.
    """
    terms = pair.gradients
    of_both = [s.trace.calls(s.position, shard) for s, _ in pair.both for shard in s.shards]
    is_single = all(len(calls) == 2 and calls[1].startswith("backward") for calls in of_both)
    is_single |= {s.trace.about.framework for s, _ in pair.both} == {"jax"}
    if not (is_single and agree_in_value(pair)) or any(terms.removed):
        return False
    if not terms.raw:
        return pair.second.has("sums") and not pair.second.changed_by_hand
    total = {name: np.sum([own[name] for own in terms.raw], axis=0) for name in terms.names}
    factors, known = solve(terms.given[0], [total])
    right = [(float(factors[0]), total)]
    return bool(known.all()) and all(pair.tolerance.fits(own, right) for own in terms.given)


def _are_all_compared(pair: StepPair) -> bool:
    """Returns whether outputs and gradients of the loss were compared on each shard."""
    matched = [m for m in matched_examples(pair) if m.pairs["y_pred"] and m.pairs["y_grad"]]
    return {m.shard for m in matched} == {*pair.second.shards}


def _other_dtypes(pair: StepPair) -> str:
    """Explains gradients by layers that compute in another dtype; "" if they do not.

    It is also "" if rounding to this dtype does not have such an effect.
    """
    used = [
        {step.trace.computed_in(shard) for shard in step.shards}
        for step in (pair.first, pair.second)
    ]
    if used[0] == used[1]:
        return ""
    unit = max(UNITS.get(dtype, EPS) for dtype in used[0] | used[1])
    if np.median([*pair.different_gradients.values()]) > MARGIN * unit:
        return ""
    first, second = (" and ".join(sorted(each)) for each in used)
    return f"layers compute in {first} in the first recording, and in {second} in the second"


def other_layers(pair: StepPair) -> list[tuple[str, str, str]]:
    """Returns what is different in the layers of two trainings, as none of it can be computed.

    Returns:
        Cause, text and status: `NOT_COMPARED` of layers that mix or draw per replica.
    """
    if text := _other_modes(pair):
        return [("inference_mode", text, FAULT)]
    if text := _other_replicas(pair.second.trace):
        return [("other_layer_settings", text, FAULT)]
    causes = []
    # If neither script synchronizes BatchNorm, it is no fault.
    is_choice = all(num_local_norms(step) for step, _ in pair.both)
    status = NOT_COMPARED if is_choice else FAULT
    for step, which in pair.both if not pair.has_same_shards else ():
        count = num_local_norms(step)
        if count and step.trace.about.num_replicas > 1:
            text = (
                f"{count} BatchNorm layers of the {which} recording normalise the examples of each"
                " replica apart"
            )
            causes.append(("local_statistics", text, status))
    if not causes and (text := inference_by_statistics(pair)):
        causes.append(("inference_mode", text, FAULT))
    if not causes and (text := normalised_apart(pair)):
        causes.append(("local_statistics", text, FAULT))
    causes += [(cause, text, FAULT) for cause, text in other_settings(pair)]
    is_random = draws_other_numbers(pair) or any(_has_random_layers(step) for step, _ in pair.both)
    if not causes and not pair.has_same_shards and is_random and not _draw_the_same(pair):
        text = "random layers draw other numbers in the two recordings"
        causes.append(("random_layers", text, NOT_COMPARED))
    if not causes and (why := other_draws(pair, OF_MODEL)):
        causes.append((*why[:2], FAULT))
    return causes


def _other_replicas(trace: Trace) -> str:
    """Returns a sentence if layers of a replica have other settings than those of replica 0."""
    for replica, about in trace.of_replica.items():
        for own, usual in zip(about.layers, trace.about.layers, strict=False):
            for setting in own.keys() & usual.keys() - {"weights"}:
                if own[setting] != usual[setting]:
                    return (
                        f"{own.get('name')} has {setting} {own[setting]} on replica {replica}, and"
                        f" {usual[setting]} on replica 0"
                    )
    return ""


def _draw_the_same(pair: StepPair) -> bool:
    """Returns whether equal outputs and losses show that the forward passes draw equal numbers."""
    return have_equal_outputs(pair) and agree_in_value(pair)


def _has_random_layers(step: Context) -> bool:
    """Returns whether layers, or functions between them, draw random numbers."""
    is_used = step.has("random_after") and any(draws(step, shard) for shard in step.shards)
    return is_used or any(map(is_random, step.trace.about.layers))


def _other_modes(pair: StepPair) -> str:
    """Returns a sentence if layers are in evaluation mode in one recording only; else ""."""
    used = [
        set().union(*(step.trace.in_evaluation(step.position, shard) for shard in step.shards))
        for step, _ in pair.both
    ]
    layers = [[layer.get("name") for layer in step.trace.about.layers] for step, _ in pair.both]
    are_known = all(step.trace.about.in_evaluation for step, _ in pair.both)
    names = sorted(used[0] ^ used[1])
    if layers[0] != layers[1] or not (are_known and names):
        return ""
    of = {
        which
        for (_, which), own, other in zip(pair.both, used, used[::-1], strict=True)
        if own - other
    }
    where = f"the {of.pop()} recording" if len(of) == 1 else "one recording"
    noun = count("layer", len(names))
    return f"{noun} ({first_names(names)}) in evaluation mode in {where} only"
