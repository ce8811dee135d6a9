"""The verdict: a status, the place, the formula, a name, and what was not compared."""

import dataclasses
import json
from collections.abc import Iterable, Mapping

CLEAN, BY_DESIGN, FAULT = "clean", "by design", "fault"
NOTHING, NOT_COMPARED, NOT_VERIFIED = "nothing to verify", "not compared", "not verified"
# Status → exit code of the command, from the best status to the worst. "By design" is what a
# computation reproduces; a difference that nothing could compute is "not compared".
EXIT_CODE_OF = {CLEAN: 0, BY_DESIGN: 0, NOTHING: 3, NOT_COMPARED: 3, NOT_VERIFIED: 3, FAULT: 9}

START, EXAMPLES, RANDOM, OUTPUTS, LOSS = "start", "examples", "random", "outputs", "loss"
GRADIENT, SUM, CLIPPING, UPDATE, BETWEEN = "gradient", "sum", "clipping", "update", "between"
NODES = {  # In the order of the data.
    START: "weights, statistics and optimizer state before the first step",
    EXAMPLES: "examples, each of which must be on one rank, with its target",
    RANDOM: "the random numbers that ranks and steps draw",
    OUTPUTS: "what the model computes for each example",
    LOSS: "the ranks' losses, whose sum must be the loss of the whole batch",
    GRADIENT: "what each rank computes of its part of the loss",
    SUM: "what each rank gets of the gradients of all, before clipping",
    CLIPPING: "the sum as it is clipped, and enters the optimizer",
    UPDATE: "weights, statistics and optimizer state after the step",
    BETWEEN: "the same from the end of a step to the start of the next one",
}


@dataclasses.dataclass(frozen=True)
class Place:
    """Where two trainings first part.

    Attributes:
        node: one of `NODES`.
        step: number of the step, from 0.
        tensors: the reference's names of the wrong tensors; empty if no tensor is, or all are.
        num_tensors: number of tensors that this node has; 0 if it is not known.
        ranks: the wrong ranks, as in "replica 1"; empty for all.
        where: where in the first tensor, as in "rows 0 to 3 of 8"; "" for everywhere.
        module: the first wrong module and its pass, as in "layers.3.attn, backward"; "" if unknown.
    """

    node: str
    step: int
    tensors: tuple[str, ...] = ()
    num_tensors: int = 0
    ranks: tuple[str, ...] = ()
    where: str = ""
    module: str = ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """How far a node is from the reference's, over all steps that were compared.

    Attributes:
        node: one of `NODES`.
        share: the largest difference over what rounding allows; 0 if all arrays are bitwise equal.
        num_equal: number of bitwise equal arrays.
        num_arrays: number of arrays that were compared.
    """

    node: str
    share: float
    num_equal: int
    num_arrays: int


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What is said of a training.

    Attributes:
        status: a key of `EXIT_CODE_OF`.
        place: where it first parts from the reference; None if it does not.
        formula: lines: what the wrong arrays are made of, with the reference's beside it.
        name: the mistake that fits, a key of `answer.names.NAMES`; "" if none does.
        reason: what was seen, with its numbers, in words.
        missing: why it is not verified, not compared, or has nothing to verify.
        notes: what was not compared, and why.
        remarks: what else was done, as that a second run has the same fault.
        num_unknown: elements of the state that were not compared, as their gradients are rounding.
        measured: the nodes that were compared, in the order of `NODES`.
        error: the error with which naming ended; status and place do not depend on it.
        training: the name of the training.
        reference: what it was compared with, as in "training of one.npz".
        framework: the framework of the training, as "torch".
        num_replicas: number of its replicas.
        steps: numbers of the steps that it has recorded, from 0.
        step_names: names of steps that are not called "step N" after their number.
        tolerance: how the bounds were computed.
    """

    status: str
    place: Place | None = None
    formula: tuple[str, ...] = ()
    name: str = ""
    reason: str = ""
    missing: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()
    num_unknown: int = 0
    measured: tuple[Measured, ...] = ()
    error: str = ""
    training: str = ""
    reference: str = ""
    framework: str = ""
    num_replicas: int = 1
    steps: tuple[int, ...] = ()
    step_names: Mapping[int, str] = dataclasses.field(default_factory=dict)
    tolerance: str = ""

    @property
    def ok(self) -> bool:
        """Whether something was verified, and is the reference."""
        return EXIT_CODE_OF[self.status] == 0

    @property
    def is_bitwise(self) -> bool:
        """Whether every array that was compared is bitwise the reference's."""
        return bool(self.measured) and all(m.num_equal == m.num_arrays for m in self.measured)

    def name_of(self, step: int) -> str:
        """Returns the name of a step, as in "step 3"."""
        return self.step_names.get(step, f"step {step}")

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
