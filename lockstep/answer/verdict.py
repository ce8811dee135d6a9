"""Defines the answer of a verification: findings, measurements and the verdict."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from lockstep.answer.causes import OF_WEIGHTS, cause_of

CLEAN, BY_DESIGN, FAULT = "clean", "by design", "fault"
NOTHING, NOT_COMPARED = "nothing to verify", "not compared"
NOT_VERIFIED = "not verified"
# Status of a verdict → exit code of the command, from the best status to the worst. "By design" is
# what a computation predicts; a difference that nothing could compute is "not compared".
EXIT_CODE_OF = {CLEAN: 0, BY_DESIGN: 0, NOTHING: 3, NOT_COMPARED: 3, NOT_VERIFIED: 3, FAULT: 9}

STAGES = {
    "start": "weights and optimizer state before the step: equal on all replicas, and as expected",
    "random numbers": "no two replicas and no two steps draw the same random numbers",
    "examples": "every example of the global batch is on one replica, with its target",
    "forward": "each replica's predictions for its examples",
    "loss": "the sum of the replicas' losses: equal to the loss of the whole batch",
    "regularisation": "the sum of the regularisation losses: equal to that of one device",
    "gradients": "each replica's gradients of its loss, before clipping",
    "clipping": "the sum of the gradients after clipping: equal to the clipped sum",
    "all-reduce": "the gradients that each replica receives: the sum or mean of those sent",
    "update": "weights and optimizer state after the update",
    "statistics": "moving statistics and seeds after the step",
    "agreement": "weights and optimizer state after the step: equal on all replicas",
    "evaluation": "loss and metrics of an evaluation: every example is counted once",
    "time": "no replica sends its gradients much later than all others",
}


@dataclasses.dataclass(frozen=True)
class Finding:
    """A difference in one stage; built by `finding_of` alone.

    Attributes:
        stage: a key of `STAGES`.
        status: `BY_DESIGN`, `FAULT`, `NOT_COMPARED`, or `NOTHING` for values that are not finite on
            one device.
        detail: the most exact name of the difference, a key of `causes.DETAILS`.
        text: one sentence with the numbers.
        steps: numbers of the steps with this difference, from 0.
        items: replicas or micro-batches with this difference, as in "replica 1"; empty for all.
        tensors: names of the affected variables; empty if no variable is.
        distance: the largest relative difference.
        allowed: the largest relative difference that rounding can cause; 0 if unknown or none.
        may_be: details that explain it in its step as well, such as a gradient of the previous step
            for a gradient of 0 in the first step.
        module: the first module with this difference and its pass, as in "layers.3.attn.wo,
            backward"; "" if it is unknown.
        seen: what the recorder saw of the mechanism, a key of `causes.IF_SEEN`; "" if unknown.
    """

    stage: str
    status: str
    detail: str
    text: str
    steps: tuple[int, ...]
    items: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    distance: float = 0.0
    allowed: float = 0.0
    may_be: tuple[str, ...] = ()
    module: str = ""
    seen: str = ""

    @property
    def cause(self) -> str:
        """The cause that the detail belongs to, one of `causes.CAUSES`."""
        return cause_of(self.detail)


def finding_of(
    stage: str, detail: str, text: str, steps: Iterable[int], *, status: str = FAULT,
    items: Iterable[str] = (), tensors: Iterable[str] = (), distance: float = 0.0,
    allowed: float = 0.0, may_be: Iterable[str] = (), seen: str = "",
) -> Finding:  # fmt: skip
    """Returns a finding, with each item once; see `Finding`.

    Raises:
        KeyError: the detail is none of `causes.DETAILS`.
    """
    cause_of(detail)
    return Finding(
        stage, status, detail, text, tuple(steps), tuple(dict.fromkeys(items)), tuple(tensors),
        distance, allowed, tuple(may_be), seen=seen,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Measurement:
    """The difference of one array of one step from what is expected.

    Attributes:
        step: number of the step, from 0.
        stage: a key of `STAGES`.
        tensor: name of the variable, or "loss".
        item: the replica or micro-batch, as in "replica 1".
        distance: relative difference.
        allowed: relative difference that rounding can cause.
        same_bits: whether the array is bitwise that of one device in float32.
    """

    step: int
    stage: str
    tensor: str
    item: str
    distance: float
    allowed: float
    same_bits: bool = False

    @property
    def is_within(self) -> bool:
        """Whether the array is right."""
        return self.same_bits or self.distance <= self.allowed


@dataclasses.dataclass(frozen=True)
class Verdict:
    """Whether a training is the one that it should be; the result of checking a trace.

    Attributes:
        name: name of the training.
        reference: the training that it should be, as in "training of one.npz"; "" if the trace was
            checked on its own.
        steps: numbers of the checked steps, from 0.
        num_replicas: number of replicas of the training.
        findings: all differences, in the order of the stages.
        checked: the stages that could be checked.
        tolerance: how the tolerances were computed.
        notes: what could not be compared, and why.
        measurements: every array that was compared with a computed one.
        framework: `About.framework` of the trace; selects the remedies.
        idle: number of a step of which nothing can be verified → why, as in "every gradient is 0".
        step_names: names of steps that are not called "step N" after their number.
        unverified: reasons for which the training as a whole is not verified, such as an exception
            that ended it.
        unknown_elements: number of elements of the state whose change was not compared, over all
            steps, as their gradients are rounding alone.
        unknown_weights: names of trained weights whose update was compared in no step.
    """

    name: str
    reference: str
    steps: tuple[int, ...]
    num_replicas: int
    findings: tuple[Finding, ...]
    checked: tuple[str, ...]
    tolerance: str
    notes: tuple[str, ...] = ()
    measurements: tuple[Measurement, ...] = ()
    framework: str = ""
    idle: Mapping[int, str] = dataclasses.field(default_factory=dict)
    step_names: Mapping[int, str] = dataclasses.field(default_factory=dict)
    unverified: tuple[str, ...] = ()
    unknown_elements: int = 0
    unknown_weights: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether something was verified, and has no fault."""
        return self.status in (CLEAN, BY_DESIGN)

    @property
    def faults(self) -> list[Finding]:
        """The findings with status `FAULT`."""
        return [finding for finding in self.findings if finding.status == FAULT]

    @property
    def status(self) -> str:
        """The worst status of what was found, a key of `EXIT_CODE_OF`.

        A training that is not finite on one device either has nothing to verify from there on.
        """
        found = [finding.status for finding in self.findings]
        found += [NOTHING] if {*self.idle} >= {*self.steps} else []
        return worst([*found, *([NOT_VERIFIED] if self.unverified else [])])

    @property
    def is_bitwise(self) -> bool:
        """Whether every array is bitwise that of one device in float32."""
        return bool(self.measurements) and all(each.same_bits for each in self.measurements)

    def name_of(self, step: int) -> str:
        """Returns the name of a step, as in "step 3"."""
        return self.step_names.get(step, f"step {step}")

    def status_of(self, stage: str, step: int | None = None) -> str:
        """Returns the status of a stage, in a step or in all; "not checked" if it was not checked.

        Args:
            stage: a key of `STAGES`.
            step: number of a step; None for all. A step of which nothing can be verified has only
                the statuses of its findings.
        """
        found = [
            finding.status
            for finding in self.findings
            if finding.stage == stage and (step is None or step in finding.steps)
        ]
        is_checked = stage in self.checked and (step is None or step not in self.idle)
        return worst(found) if found or is_checked else "not checked"

    def __str__(self) -> str:
        from lockstep.answer.text import describe

        return describe([self], details=True)

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the page of the verdict, in a frame of its own."""
        from lockstep.answer.html import frame_of

        return frame_of([self])

    def to_json(self) -> str:
        """Returns the verdict as JSON text; see docs/for_agents.md."""
        from lockstep.answer.json import record_of

        return json.dumps(record_of(self), indent=1)


def worst(statuses: Iterable[str]) -> str:
    """Returns the worst of some statuses; `CLEAN` of none."""
    return max([CLEAN, *statuses], key=[*EXIT_CODE_OF].index)


def _fitting_all_steps(findings: Sequence[Finding], finding: Finding) -> Finding:
    """Returns a finding with the detail that explains the other steps, too, if there is one."""
    for other in findings:
        same_place = other.stage == finding.stage and set(finding.tensors) & set(other.tensors)
        if same_place and other.steps != finding.steps and other.detail in finding.may_be:
            return dataclasses.replace(finding, detail=other.detail, text=other.text)
    return finding


def merged(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    """Merges findings of equal stage, status and detail over steps, items and tensors.

    They are in the order of the first step of each, then of stages: a later one may follow from it.
    """
    same: dict[tuple[str, str, str], list[Finding]] = {}
    for finding in map(partial(_fitting_all_steps, findings), findings):
        same.setdefault((finding.stage, finding.status, finding.detail), []).append(finding)
    order = list(STAGES)
    groups = sorted(
        same.values(),
        key=lambda group: (
            min(min(each.steps, default=0) for each in group),
            order.index(group[0].stage),
        ),
    )
    return tuple(
        dataclasses.replace(
            group[0],
            steps=tuple(sorted({step for each in group for step in each.steps})),
            items=tuple(dict.fromkeys(item for each in group for item in each.items)),
            tensors=tuple(dict.fromkeys(name for each in group for name in each.tensors)),
            distance=max(each.distance for each in group),
        )
        for group in groups
    )


def note_of_repetition(verdict: Verdict, second: Verdict) -> str:
    """Returns whether a second run of a training, from the same states, has the same faults."""
    if is_reproduced(verdict, second):
        return "reproducible: a second run from the same states has the same faults"
    first, again = _faults_of(verdict), _faults_of(second)
    return (
        f"not reproducible: a second run from the same states has {len(first & again)} of these"
        f" {len(first)} faults; look for a race, an uninitialised buffer or broken hardware"
    )


def is_reproduced(verdict: Verdict, second: Verdict) -> bool:
    """Returns whether a second run has the same faults.

    Where it names modules, which change and join faults, these are at the same places.
    """
    if any(fault.module or fault.seen == OF_WEIGHTS for fault in second.faults):
        first, again = (
            {(fault.stage, name) for fault in each.faults for name in fault.tensors or ("",)}
            for each in (verdict, second)
        )
        return first == again
    return _faults_of(verdict) == _faults_of(second)


def _faults_of(verdict: Verdict) -> set[tuple[str, str, tuple[str, ...]]]:
    return {(fault.stage, fault.detail, fault.tensors) for fault in verdict.faults}


def in_sequence(parts: Sequence[Verdict]) -> Verdict:
    """Joins verdicts on successive parts of one training; steps keep their names.

    Args:
        parts: verdicts of the same name and reference.
    """
    first, found, measured = parts[0], list[Finding](), list[Measurement]()
    names, idle = dict[int, str](), dict[int, str]()
    for part in parts:
        number = {step: len(names) + position for position, step in enumerate(part.steps)}
        names |= {number[step]: part.name_of(step) for step in part.steps}
        found += [
            dataclasses.replace(each, steps=tuple(number[step] for step in each.steps))
            for each in part.findings
        ]
        idle |= {number[step]: why for step, why in part.idle.items()}
        measured += [dataclasses.replace(m, step=number[m.step]) for m in part.measurements]
    checked = {stage for part in parts for stage in part.checked}
    return dataclasses.replace(
        first,
        steps=tuple(names),
        step_names=names,
        findings=merged(found),
        measurements=tuple(measured),
        checked=tuple(stage for stage in STAGES if stage in checked),
        notes=tuple(dict.fromkeys(note for part in parts for note in part.notes)),
        unverified=tuple(dict.fromkeys(why for part in parts for why in part.unverified)),
        unknown_elements=sum(part.unknown_elements for part in parts),
        unknown_weights=tuple(dict.fromkeys(n for part in parts for n in part.unknown_weights)),
        idle=idle,
    )
