"""What differs before the backward pass of two trainings: losses, layers, dtypes."""

from collections.abc import Sequence

import numpy as np

from lockstep.answer.verdict import BY_DESIGN, Finding
from lockstep.arithmetic import EPS, MARGIN, UNITS
from lockstep.checks.other_forward import other_layers
from lockstep.explain.losses import other_form, weights_of_losses
from lockstep.reference import StepPair


def differ_by_design(pair: StepPair) -> bool:
    """Returns whether the outputs of a right training would differ, too."""
    causes = other_layers(pair)
    return bool(causes) and all(design for *_, design in causes)


def other_settings_of(pair: StepPair, wrong: Sequence[str]) -> list[Finding]:
    """Returns what differs before the backward pass: in the loss, or in the layers."""
    earlier = [each for each in pair.findings if each.stage in ("forward", "loss")]
    known = [each for each in earlier if each.detail != "unexplained"]
    causes = [(each.detail, each.text, each.status == BY_DESIGN) for each in known]
    if not causes and (text := _other_dtypes(pair)):
        causes = [("reduced_precision", text, False)]
    causes = causes or other_layers(pair)
    if causes and all(design for *_, design in causes):
        others = weights_of_losses(pair)
        if text := other_form(pair):
            others.append(("other_loss", text))
        causes = [(*why, False) for why in others] or causes
    if not causes:
        num = len(pair.gradients.names)
        text = f"{len(wrong)} of {num} gradients differ, and no known cause explains it"
        if pair.has("data", "y_pred", "y_grad") and not earlier:
            text += "; outputs and losses agree, so that it is in the backward pass or after it"
        causes.append(("unexplained", text, False))
    return [
        pair.second.found(cause, text, tensors=wrong, design=design)
        for cause, text, design in causes
    ]


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
