"""Compares an evaluation with one device."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lockstep.answer.verdict import BY_DESIGN, FAULT, NOT_COMPARED, Finding, finding_of
from lockstep.numeric.arrays import EPS, MARGIN, ratio


def check_evaluation(
    logs: Mapping[str, float], expected: Mapping[str, float], *,
    drawn: Sequence[str] = (), loss_of_local_states: Callable[[], float] | None = None,
) -> list[Finding]:  # fmt: skip
    """Compares loss and metrics of an evaluation with those of one device.

    Args:
        logs: name → number of the evaluation by all replicas.
        expected: the same of one device.
        drawn: names of the seeds from which the evaluation draws random numbers.
        loss_of_local_states: returns the loss if each replica evaluates its own examples with its
            own state; None if all replicas have the same state.
    """
    apart = {n: ratio(abs(logs[n] - value), abs(value)) for n, value in expected.items()}
    allowed = MARGIN * 16 * EPS  # For means over some thousand numbers in another order.
    wrong = [name for name, by in apart.items() if not by <= allowed]
    if not wrong:
        return []
    text = "; ".join(f"{n} is {logs[n]:.6g}, one device has {expected[n]:.6g}" for n in wrong)
    # A wrongly summed metric does not affect the loss; wrong examples change both.
    status, detail = FAULT, "other_evaluation" if "loss" in wrong else "other_metric"
    if "loss" in wrong and loss_of_local_states:
        local = loss_of_local_states()
        if ratio(abs(logs["loss"] - local), abs(local)) <= allowed:
            status, detail = BY_DESIGN, "local_statistics"
            text += "; each replica evaluates with different moving statistics"
    if drawn:  # Replicas, and other orders of examples, use different random numbers.
        status, detail = NOT_COMPARED, "random_evaluation"
        text += f"; the evaluation draws random numbers from {drawn[0]}"
    by = float(np.max([apart[name] for name in wrong]))
    found = finding_of(
        "evaluation", detail, text, (0,), status=status, tensors=wrong, distance=by, allowed=allowed
    )
    return [found]
