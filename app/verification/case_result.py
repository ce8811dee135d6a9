"""The result of verifying a case, as its process returns it; nothing here imports TensorFlow."""

import dataclasses
from typing import Any

from app.records.case_record import FAULT


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """The result of one strategy, as it stands in `verify.json`.

    Attributes:
        reference: what the training is compared with: "training that a.py defines on one device".
        devices: names.
        simulated_devices: whether the devices share a processor.
        steps: names of the steps that were checked.
        stages: stage → "clean", "by design" or "fault", for the stages that were checked.
        checks: stage → what is checked in it, for all stages, in their order.
        findings: one dict for each finding of `recorders.keras_comparison`, in the order of the
            stages: its fields and its remedy, with the names of steps in place of their numbers.
        tolerance: how the tolerances were computed.
        model: name of the model.
        versions: name → version of the software that the numbers depend on.
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
