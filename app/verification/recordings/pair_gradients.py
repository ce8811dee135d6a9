"""Compares the gradients of a step in two recordings, and explains differences by computation."""

import dataclasses
from collections.abc import Sequence

from app.verification.recordings.gradient_explanations import (
    Allowed,
    decays_equally,
    explanations,
    explanations_by_settings,
)
from app.verification.recordings.layer_settings import num_local_norms
from app.verification.recordings.recorded_step import Named
from app.verification.recordings.step_pair import StepPair
from app.verification.recordings.trace_arrays import distances_of, factor, total_norm
from app.verification.recordings.trace_finding import TraceFinding, fault
from lockstep.verdict import BY_DESIGN, FAULT


def compare_gradients(pair: StepPair, allowed: Allowed) -> list[TraceFinding] | None:
    """Compares the gradients of the whole batch, which start from the same state.

    Returns:
        The findings; None if a recording has no such gradient.
    """
    if (both := pair.gradients()) is None:
        return None
    first, second = both
    apart = distances_of(second, first)
    wrong = [name for name, far in apart.items() if far > allowed(name)]
    if not wrong:
        return []

    largest, limit = max(apart.values()), max(map(allowed, wrong))
    return [
        dataclasses.replace(finding, distance=largest, allowed=limit)
        for finding in _why(pair, first, second, wrong, allowed)
    ]


def _why(
    pair: StepPair, first: Named, second: Named, wrong: Sequence[str], allowed: Allowed
) -> list[TraceFinding]:
    """Returns the first computed cause that explains the difference, else all possible settings."""
    for cause, text, tensors in explanations(pair, first, second, wrong, allowed):
        status = FAULT
        if cause == "regularisation_in_the_loss" and decays_equally(pair, first, second, allowed):
            status = BY_DESIGN
            text += ", and the optimizer of the other one decays the weights by as much"
        where = ("gradients", status, cause, text, (pair.number,))
        return [TraceFinding(*where, tensors=tuple(tensors))]
    found = []
    for cause, text, tensors in explanations_by_settings(pair, wrong):
        # If neither script synchronizes BatchNorm, it is by design.
        is_choice = cause == "local_statistics" and all(
            map(num_local_norms, (pair.first, pair.second))
        )
        where = ("gradients", BY_DESIGN if is_choice else FAULT, cause, text, (pair.number,))
        found.append(TraceFinding(*where, tensors=tuple(tensors)))
    if found:
        return found
    names = tuple(wrong)
    if pair.first.has_random_layers or pair.second.has_random_layers:
        text = "random layers draw other numbers in the two recordings"
        return [
            TraceFinding(
                "gradients", BY_DESIGN, "random_layers", text, (pair.number,), tensors=names
            )
        ]
    text = f"{len(wrong)} of {len(first)} gradients differ, and no known cause explains it"
    return [fault("gradients", "unexplained_gradient", text, pair.number, tensors=names)]


def compare_clipping(pair: StepPair, allowed: Allowed) -> list[TraceFinding] | None:
    """Compares the clipping factors of gradients that agree."""
    both, applied = pair.gradients(), pair.applied()
    if both is None or applied is None:
        return None
    apart = distances_of(applied[1], applied[0])
    if all(far <= allowed(name) for name, far in apart.items()):
        return []
    scales = [
        factor([after[name] for name in after], [before[name] for name in after])
        for before, after in zip(both, applied, strict=True)
    ]
    norms = [total_norm(list(gradients.values())) for gradients in applied]
    return [
        fault(
            "clipping",
            "other_clipping",
            f"gradients are multiplied by {scales[0]:.6g} (to norm {norms[0]:.4g}) in the first"
            f" recording and by {scales[1]:.6g} (to norm {norms[1]:.4g}) in the second",
            pair.number,
            distance=max(apart.values()),
        )
    ]
