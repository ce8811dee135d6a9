"""Defines the result of verifying a case. Does not import TensorFlow."""

import dataclasses
from typing import Any

from app.verification.case_record import FAULT


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The result of one strategy, as in `verify.json`.

    Attributes:
        reference: description of the reference, as in "training that a.py defines on one device".
        devices: device names.
        simulated_devices: whether the devices share a processor.
        steps: names of the steps that were checked.
        stages: stage → "clean", "by design" or "fault", for the stages that were checked.
        checks: stage → what it checks, for all stages, in order.
        findings: one dict per finding of `recorders.keras_comparison`, in the order of the stages:
            its fields and its remedy, with names of steps instead of their numbers.
        tolerance: description of how the tolerances were computed.
        model: name of the model.
        versions: name → version of the software that affects the results.
    """

    reference: str
    devices: list[str]
    simulated_devices: bool
    steps: list[str]
    stages: dict[str, str]
    checks: dict[str, str]
    findings: list[dict[str, Any]]
    tolerance: str
    model: str
    versions: dict[str, str]

    @property
    def faults(self) -> list[dict[str, Any]]:
        """The findings with status "fault"."""
        return [finding for finding in self.findings if finding["status"] == FAULT]
