"""Compares recorded steps with one device, stage by stage."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from .check_agreement import check_agreement
from .check_all_reduce import check_all_reduce
from .check_clipping import check_clipping
from .check_examples import check_examples
from .check_forward import check_forward
from .check_gradients import check_gradients
from .check_loss import check_loss
from .check_random_numbers import check_random_numbers
from .check_regularisation import check_regularisation
from .check_start import check_start
from .check_statistics import check_statistics
from .check_update import check_update
from .context import StepContext
from .distances import is_finite
from .expected_step import compute_expected
from .findings import Finding, Report, merged_findings
from .float64_reference import build_in_float64
from .recorder_imports import Arrays, Recording, leaves
from .reference_model import OneDevice

CHECKS: dict[str, Callable[[StepContext], Iterator[Finding]]] = {  # Stage → its check.
    "start": check_start,
    "random numbers": check_random_numbers,
    "examples": check_examples,
    "forward": check_forward,
    "loss": check_loss,
    "regularisation": check_regularisation,
    "gradients": check_gradients,
    "clipping": check_clipping,
    "all-reduce": check_all_reduce,
    "update": check_update,
    "statistics": check_statistics,
    "agreement": check_agreement,
}


def compare(
    record: Recording,
    model: keras.Model | Callable[[], keras.Model],
    *,
    batches: Sequence[Any] = (),
    on_step: Callable[[int], None] = lambda step: None,
) -> Report:
    """Checks every stage of every recorded step against one device.

    Args:
        record: a `Recorder` after its `with` block, or a `Recording` that was loaded.
        model: the model compiled by the same code, outside of the strategy's scope; or a function
            that builds it: the expected values are then computed in float64, if the model supports
            it.
        batches: the global batch of each step as defined by the dataset; none to use the batches
            that the replicas received.
        on_step: called after each step.

    Raises:
        ValueError: nothing was recorded, or another model.
    """
    if not record.steps:
        raise ValueError(
            "nothing was recorded; call model.fit, or model.train_step, within the `with` block"
        )
    if isinstance(model, keras.Model):
        one, exact, why_not = OneDevice(model, record), None, ""
    else:
        one = OneDevice(model(), record)
        exact, why_not = build_in_float64(model, record, one)
    comparison = Comparison(record, one, exact)
    found: list[Finding] = []
    for position in range(len(record.steps)):
        batch = leaves(batches[position]) if position < len(batches) else None
        found += comparison.check(position, batch)
        on_step(position + 1)
    tolerance = comparison.tolerance + (f" (not float64: {why_not})" if why_not else "")
    findings, checked = merged_findings(found), comparison.checked
    return Report(len(record.steps), record.num_replicas, findings, checked, tolerance)


class Comparison:
    """Checks the steps of a recording in order.

    Args:
        recording: a recording of any number of replicas.
        one: the same model on one device.
        exact: the same model in float64, if available.

    Attributes:
        checked: the stages that have been checked.
    """

    def __init__(self, recording: Recording, one: OneDevice, exact: OneDevice | None = None):
        self._recording, self._one, self._exact = recording, one, exact
        self._num_in_float64 = 0
        self.checked: list[str] = []

    def check(self, position: int, batch: Arrays | None = None) -> Iterator[Finding]:
        """Yields the differences from one device in a step, stage by stage.

        Args:
            position: position of the step in the recording, from 0.
            batch: the global batch defined by the dataset, if known.
        """
        context = StepContext(
            self._recording, position, self._one, self._exact, batch, self.checked
        )
        if not all(is_finite(before) for before in context.per_replica("before")):
            yield context.found(
                "not_finite",
                "the step starts from weights that are NaN or infinite, so it cannot be compared",
                design=True,
            )
            return
        compute_expected(context)
        for stage, check in CHECKS.items():
            context.stage = stage
            yield from check(context)
        self._num_in_float64 += context.num_in_float64

    @property
    def tolerance(self) -> str:
        """How the tolerances were computed."""
        spread = "spread over orders of summation and weights changed by one unit in the last place"
        if not self._num_in_float64:
            return spread
        return f"float64 on one device and the difference of float32 from it; {spread}"
