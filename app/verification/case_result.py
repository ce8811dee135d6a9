"""What the process that verifies a case hands back; nothing here imports TensorFlow."""

import dataclasses

FAULT = "fault"  # As the recorder has it.
EVALUATION = "an evaluation"  # The name of the last "step".


@dataclasses.dataclass(frozen=True)
class CaseFinding:
    """What is not as on one device, in one stage.

    Attributes:
        stage: of `recorders.lockstep_keras.STAGES`.
        status: "by design" or "fault".
        cause: a short name.
        text: one sentence with the numbers.
        remedy: what to do.
        steps: names of the steps in which it was found.
        replicas: on which; empty for all together.
        tensors: paths of the variables concerned.
        distance: relative, the largest one.
        allowed: how far rounding could carry it, likewise.
    """

    stage: str
    status: str
    cause: str
    text: str
    remedy: str
    steps: tuple[str, ...]
    replicas: tuple[int, ...]
    tensors: tuple[str, ...]
    distance: float
    allowed: float


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What was found of a case with one strategy.

    Attributes:
        devices: names.
        simulated_devices: whether they share a processor.
        steps: names of the steps that were looked at.
        stages: stage → "clean", "by design" or "fault", of those that were checked.
        findings: in the order of the stages.
        tolerance: how the tolerances were found.
        model: name of the model.
        versions: of what numbers depend on.
    """

    devices: list[str]
    simulated_devices: bool
    steps: list[str]
    stages: dict[str, str]
    findings: list[CaseFinding]
    tolerance: str
    model: str
    versions: dict[str, str]

    @property
    def faults(self) -> list[CaseFinding]:
        """The findings that are no design."""
        return [finding for finding in self.findings if finding.status == FAULT]
