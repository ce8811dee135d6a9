"""The table of the verifier's faults: a training, what is wrong in it, and what is said of it.

Its rows are in the modules of this package; `check` is the one test of all of them.
"""

from collections.abc import Callable
from typing import NamedTuple

from lockstep.answer.causes import cause_of
from lockstep.answer.verdict import BY_DESIGN, CLEAN, FAULT, NOT_COMPARED, NOTHING, Finding, Verdict

MARKS = {FAULT: "", BY_DESIGN: "*", NOT_COMPARED: "?", NOTHING: "-"}


class Row(NamedTuple):
    """A training that is compared with a reference, and the verdict that is expected.

    Attributes:
        program: what is trained.
        bug: what is wrong in it, or may look so.
        found: `stage: detail` of the findings, joined by `; `; * marks what is by design, ? what
            is not compared.
        verdict: trains and compares.
        status: status of the verdict; "" for that of the worst finding.
        text: a part of what is said.
        place: steps, replicas and tensors of the first fault, or finding; None for any; a text is a
            part of the name of each tensor.
        checked: stages that must be checked.
        unchecked: stages that cannot be checked.
        notes: whether something may be noted.
        also: findings that may be there, too.
        module: the module of all findings that have one.
    """

    program: str
    bug: str
    found: str
    verdict: Callable[[], Verdict]
    status: str = ""
    text: str = ""
    place: tuple = ()
    checked: tuple = ()
    unchecked: tuple = ()
    notes: bool = True
    also: tuple = ()
    module: str = ""

    @property
    def name(self) -> str:
        return f"{self.program}: {self.bug}"

    @property
    def details(self) -> set[str]:
        """The details that the row expects."""
        return {each.split(": ")[1].rstrip("*?-") for each in self.found.split("; ") if each}

    @property
    def expected(self) -> str:
        """The status that the row expects."""
        marks = {each[-1] for each in [*self.found.split("; "), *self.also] if each}
        worst = FAULT if marks - {"*", "?"} else NOT_COMPARED if "?" in marks else BY_DESIGN
        return self.status or (worst if marks else CLEAN)


def label(finding: Finding) -> str:
    """Returns stage and detail of a finding, with the mark of its status."""
    return f"{finding.stage}: {finding.detail}{MARKS[finding.status]}"


def shown(verdict: Verdict, also: tuple = ()) -> str:
    """Returns the labels of the findings, but for those that may be there, too."""
    return "; ".join(name for name in map(label, verdict.findings) if name not in also)


def check(row: Row) -> None:
    """Asserts that a row's training has the verdict that the row expects."""
    verdict = row.verdict()
    told = str(verdict)
    assert (shown(verdict, row.also), verdict.status) == (row.found, row.expected), told
    assert all(finding.cause == cause_of(finding.detail) for finding in verdict.findings)
    assert not (verdict.faults and verdict.unknown_weights), told  # A fault is why they are not.
    assert row.text in " ".join(told.split()), told
    assert {*row.checked} <= {*verdict.checked}, verdict.checked
    assert {*verdict.checked}.isdisjoint(row.unchecked) and (row.notes or not verdict.notes), told
    assert {f.module for f in verdict.findings if f.module} == {*filter(None, [row.module])}, told
    if row.place:
        worst_first = [*verdict.faults, *verdict.findings]
        first = next(finding for finding in worst_first if label(finding) not in row.also)
        for told_of, wanted in zip(
            (first.steps, first.items, first.tensors), row.place, strict=True
        ):
            if isinstance(wanted, str):
                assert all(wanted in name for name in told_of or [""]), told
            else:
                assert wanted is None or {*told_of} == {*wanted}, told
