"""Findings of a comparison with one device, and the report on them."""

import dataclasses
from collections.abc import Sequence

from .remedies import REMEDIES

CLEAN, BY_DESIGN, FAULT = "clean", "by design", "fault"

STAGES = {
    "start": "weights and optimizer state before the step: equal on all replicas",
    "random numbers": "seeds of random layers: different on each replica",
    "examples": "every example of the global batch is on one replica, with its target",
    "forward": "each replica's predictions for its examples",
    "loss": "the sum of the replicas' losses: equal to the loss of the whole batch",
    "regularisation": "the sum of `model.losses` over the replicas: equal to that of one device",
    "gradients": "each replica's gradients of its loss, before clipping",
    "clipping": "the sum of the gradients after clipping: equal to the clipped sum",
    "all-reduce": "the gradients that each replica receives: the sum of those sent",
    "update": "weights and optimizer state after the update",
    "statistics": "moving statistics and seeds after the step",
    "agreement": "weights and optimizer state after the step: equal on all replicas",
    "evaluation": "loss and metrics of `evaluate`: every example is counted once",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference from one device, in one stage.

    Attributes:
        stage: a key of `STAGES`.
        status: `BY_DESIGN` or `FAULT`.
        cause: a key of `REMEDIES`.
        text: one sentence with the numbers.
        steps: numbers of the steps with this difference, from 0.
        replicas: the replicas with this difference; empty for all replicas together.
        tensors: paths of the affected variables; empty if no variable is.
        distance: the largest relative difference.
        allowed: the largest relative difference that rounding can cause.
    """

    stage: str
    status: str
    cause: str
    text: str
    steps: tuple[int, ...]
    replicas: tuple[int, ...] = ()
    tensors: tuple[str, ...] = ()
    distance: float = 0.0
    allowed: float = 0.0

    @property
    def remedy(self) -> str:
        """How to fix the fault."""
        return REMEDIES[self.cause]

    def __str__(self) -> str:
        where = count("step", self.steps)
        if self.replicas:
            where += f", {count('replica', self.replicas)}"
        if self.tensors:
            shown = ", ".join(self.tensors[:3])
            more = f" and {len(self.tensors) - 3} more" if len(self.tensors) > 3 else ""
            where += f", {shown}{more}"
        lines = [f"{self.status.upper()}: {self.cause.replace('_', ' ')} ({where})"]
        lines.append(f"why     {self.text}")
        lines.append(f"remedy  {self.remedy}")
        return "\n".join(lines)


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of comparing every stage of every recorded step.

    Attributes:
        num_steps: number of steps checked.
        num_replicas: number of replicas of the recording.
        findings: all differences, in the order of the stages.
        checked: the stages that could be checked.
        tolerance: how the tolerances were computed.
    """

    num_steps: int
    num_replicas: int
    findings: list[Finding]
    checked: list[str]
    tolerance: str

    @property
    def faults(self) -> list[Finding]:
        """The findings with status `FAULT`."""
        return [finding for finding in self.findings if finding.status == FAULT]

    def status(self, stage: str) -> str:
        """Returns "clean", "by design", "fault" or "not checked"."""
        found = {f.status for f in self.findings if f.stage == stage}
        if found:
            return FAULT if FAULT in found else BY_DESIGN
        return CLEAN if stage in self.checked else "not checked"

    @property
    def verdict(self) -> str:
        """One sentence with the result of the comparison with one device."""
        faults, by_design = (
            ", ".join(
                dict.fromkeys(f.cause.replace("_", " ") for f in self.findings if f.status == s)
            )
            for s in (FAULT, BY_DESIGN)
        )
        if faults:
            return f"not the training that the model defines on one device: {faults}"
        if by_design:
            return (
                f"different by design from the training on one device: {by_design}; no fault found"
            )
        return "the training that the model defines on one device: no fault found"

    def __str__(self) -> str:
        counts = f"{number_of('step', self.num_steps)} on {number_of('replica', self.num_replicas)}"
        lines = [f"{counts}: {self.verdict}"]
        if self.num_replicas == 1:
            lines.append(
                "only one replica: faults between replicas cannot appear; create two devices first,"
                " with tf.config.set_logical_device_configuration"
            )
        lines.append(f"tolerances: {self.tolerance}")
        for stage, what in STAGES.items():
            if (status := self.status(stage)) == "not checked":
                continue
            lines.append(f"  {stage:<15} {status:<10} {what}")
            for finding in self.findings:
                if finding.stage == stage:
                    lines += [f"      {line}" for line in str(finding).splitlines()]
        return "\n".join(lines)


def merged_findings(findings: Sequence[Finding]) -> list[Finding]:
    """Merges findings of the same cause over steps, replicas and tensors."""
    merged: dict[tuple[str, str], list[Finding]] = {}
    for finding in findings:
        merged.setdefault((finding.stage, finding.cause), []).append(finding)
    order = list(STAGES)
    return [
        dataclasses.replace(
            same[0],
            steps=tuple(sorted({s for f in same for s in f.steps})),
            replicas=tuple(sorted({r for f in same for r in f.replicas})),
            tensors=tuple(dict.fromkeys(t for f in same for t in f.tensors)),
            distance=max(f.distance for f in same),
        )
        for _, same in sorted(merged.items(), key=lambda item: order.index(item[0][0]))
    ]


def number_of(noun: str, number: int) -> str:
    """Returns a number with its noun."""
    return f"{number} {noun}{'s' * (number != 1)}"


def count(name: str, numbers: Sequence[int]) -> str:
    """Returns a noun with the given numbers."""
    return f"{name}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
