"""The verdict of the verifier: causes and remedies, sentences, findings, the JSON."""

import ast
import dataclasses
import json

import pytest

from lockstep.answer.causes import (
    CAUSES,
    CODE,
    DETAILS,
    IN_FRAMEWORK,
    MERGED,
    cause_of,
    code_of,
    remedy_of,
    words_of,
)
from lockstep.answer.json import record_of
from lockstep.answer.text import (
    describe,
    explanations,
    facts_of,
    largest_of,
    line_of,
    named_steps,
    sentence_of,
)
from lockstep.answer.verdict import Measurement, Verdict, finding_of, in_sequence, merged
from tests.cli.report_samples import CLIPPED, LOCAL
from tests.conftest import ROOT


def verdict_on(*findings, **changes):
    given = {
        "name": "fit", "reference": "training that a.py defines on one device",
        "steps": (0, 1, 2), "num_replicas": 2, "findings": merged(findings),
        "checked": ("start", "forward", "clipping"), "tolerance": "float64", "framework": "keras",
    }  # fmt: skip
    return Verdict(**given | changes)


def details_used():
    """The details in the package's code: strings before a text with spaces."""
    own = {"causes.py", "text.py"}
    for path in (ROOT / "lockstep").rglob("*.py"):
        if path.name in own or "recorders" in path.parts:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            parts = getattr(node, "args", None) if isinstance(node, ast.Call) else None
            parts = node.elts if isinstance(node, ast.Tuple) else parts
            name = getattr(getattr(node, "func", None), "attr", "")
            for first, second in zip(parts or [], (parts or [])[1:], strict=False):
                is_name = isinstance(first, ast.Constant) and isinstance(first.value, str)
                is_text = isinstance(second, ast.JoinedStr) or " " in str(
                    getattr(second, "value", "")
                )
                if is_name and first.value.replace("_", "").isalpha() and (
                    is_text or name == "found"
                ):  # fmt: skip
                    yield first.value


def test_every_detail_has_a_cause_and_a_remedy():
    assert len(DETAILS) == 115
    for framework, remedies in IN_FRAMEWORK.items():
        assert remedies.keys() <= DETAILS.keys()
        for detail, remedy in DETAILS.items():
            assert remedy_of(detail, framework) and remedy_of(detail, "another") == remedy
    for framework, changes in CODE.items():
        assert changes.keys() <= DETAILS.keys() and all(new for _, new in changes.values())
        assert all(ast.parse(line) for lines in changes.values() for line in filter(None, lines))
        assert "+" in code_of(next(iter(changes)), framework) and not code_of("x", framework)
    assert {cause_of(detail) for detail in DETAILS} == {*CAUSES} and len(CAUSES) <= 65
    assert len({words_of(detail) for detail in DETAILS}) == 115
    for cause, details in MERGED.items():
        assert len(details) > 1 and {*map(cause_of, details)} == {cause}
        # The cause alone says the detail only if that is its whole kind, or a new name of it.
        assert sum(not words for words in details.values()) <= 1
        assert all(words or cause not in DETAILS or d == cause for d, words in details.items())
    with pytest.raises(KeyError, match="no_such_name"):
        finding_of("update", "no_such_name", "the text", (0,))


def test_every_detail_is_emitted_and_every_emitted_name_is_a_detail():
    found = {each for each in details_used() if "_" in each}
    assert found <= DETAILS.keys()
    places = [*(ROOT / "lockstep").rglob("*.py"), *(ROOT / "app" / "verification").glob("*.py")]
    text = "".join(path.read_text("utf-8") for path in places if path.name != "causes.py")
    of_settings = ("momentum", "dampening", "beta_1", "beta_2", "epsilon")  # f"other_{setting}"
    unused = {detail for detail in DETAILS if f'"{detail}"' not in text}
    assert unused <= {f"other_{setting}" for setting in of_settings}


def test_findings_are_built_and_compared_by_their_details():
    """A finding has the cause of its detail, and a check asks for the exact name."""
    built, asked = [], []
    for path in [*(ROOT / "lockstep").rglob("*.py"), *(ROOT / "app").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                built.append(path.name)
            if isinstance(node, ast.Compare):
                sides = [node.left, *node.comparators]
                if any(getattr(side, "attr", "") == "cause" for side in sides):
                    asked.append(ast.unparse(node))
    assert built == ["verdict.py"] and asked == []


def test_the_changelog_has_the_table_of_names():
    lines = ["| Cause | Details: the causes of version 2 |", "| --- | --- |"]
    lines += [
        f"| `{c}` | {', '.join(f'`{d}`' for d in MERGED[c])} |" for c in CAUSES if c in MERGED
    ]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\n".join(["", *lines, ""]) in changes
    kept = ", ".join(f"`{cause}`" for cause in CAUSES if cause not in (*MERGED, "other_tying"))
    assert f"Unchanged, with `detail` equal to `cause`: {kept}.\n" in changes


@pytest.mark.parametrize(
    "findings, status, end",
    [
        ((), "clean", "that a.py defines on one device: every checked stage is clean"),
        ((LOCAL,), "by design", "on one device: local statistics; no fault found"),
        (
            (LOCAL, CLIPPED), "fault",
            "other clipping (before the sum); also different by design: local statistics",
        ),
    ],
)  # fmt: skip
def test_the_verdict_is_one_sentence(findings, status, end):
    verdict = verdict_on(*findings)
    assert (verdict.status, verdict.ok) == (status, status != "fault")
    assert sentence_of(verdict).startswith("fit ") and sentence_of(verdict).endswith(end)
    alone = dataclasses.replace(verdict, reference="")
    assert sentence_of(alone).startswith("fit has ")


def test_bitwise_trainings_are_said_to_be():
    same = Measurement(0, "update", "w", "replica 0", 0.0, 1e-7, True)
    assert sentence_of(verdict_on(measurements=(same,))).endswith("clean, bit for bit")
    near = dataclasses.replace(same, same_bits=False)
    assert sentence_of(verdict_on(measurements=(same, near))).endswith("clean")


def test_findings_say_where_why_and_what_to_do():
    verdict = verdict_on(CLIPPED, LOCAL)
    assert facts_of(CLIPPED, verdict) == {
        "where": "clipping, every step; dense/kernel, dense/bias",
        "why": CLIPPED.text,
        "remedy": IN_FRAMEWORK["keras"]["clipped_before_the_sum"],
        "difference": "up to 0.47, relative; rounding allows 1e-05",
    }
    found = dataclasses.replace(CLIPPED, module="layers.3.attn.wo, backward")
    where = facts_of(found, verdict)["where"].split("; ")
    assert found.module in where
    (record,) = record_of(verdict_on(found))["findings"]
    assert record["module"] == found.module
    again = dataclasses.replace(found, stage="update", detail="frozen")
    told = sentence_of(verdict_on(found, again))
    assert told.endswith(": other clipping (before the sum) (layers.3.attn.wo, backward), frozen")
    assert facts_of(LOCAL, verdict)["where"] == (
        "forward, step 1; replicas 0, 1; bn_0, bn_1, bn_2 and 12 more"
    )
    lines = describe([verdict], details=True).splitlines()
    assert lines[0] == sentence_of(verdict)
    assert "fit: 3 steps on 2 replicas" in lines and "  tolerances      float64" in lines
    stages = [line.split(":")[0].rsplit("  ")[-1] for line in lines if line.startswith("  start")]
    assert stages == ["clean"]
    without = describe([verdict]).splitlines()
    assert lines[:3] == without[:3] and "rounding allows" not in "".join(without)
    assert line_of(CLIPPED, verdict).startswith(
        "other clipping (before the sum) in clipping, every step"
    )


def test_a_cause_in_several_stages_is_explained_once():
    lost = dataclasses.replace(CLIPPED, stage="update", text="the weights differ", steps=(1,))
    same = dataclasses.replace(CLIPPED, stage="agreement", tensors=())
    verdict = verdict_on(LOCAL, CLIPPED, lost, same)
    (fault, facts), (design, local) = explanations([verdict])
    assert (fault, design) == (
        "fit, fault: other clipping (before the sum)",
        "fit, by design: local statistics",
    )
    assert facts["why"] == CLIPPED.text and local == facts_of(LOCAL, verdict)
    assert facts["also update"] == "step 1; dense/kernel, dense/bias: the weights differ"
    assert facts["also agreement"] == "every step"
    here, elsewhere = (dataclasses.replace(f, module="a, forward") for f in (CLIPPED, same))
    ((_, facts),) = explanations([verdict_on(here, elsewhere)])
    assert "a, forward" in facts["where"] and facts["also agreement"] == "every step"
    (both, _), _ = explanations([verdict, dataclasses.replace(verdict, name="again")])
    assert both == "fit, again, fault: other clipping (before the sum)"


def test_a_difference_from_zero_has_no_relative_size():
    finding = dataclasses.replace(CLIPPED, distance=2.4e35)
    assert facts_of(finding, verdict_on(finding))["difference"] == "not 0, as it should be"


def test_findings_of_all_steps_replicas_and_tensors_are_one():
    again = dataclasses.replace(CLIPPED, steps=(4,), items=("replica 1",), tensors=("out/bias",))
    found, local = merged([CLIPPED, LOCAL, again])[::-1]
    assert local == LOCAL and found.steps == (0, 1, 2, 4) and found.items == ("replica 1",)
    assert found.tensors == ("dense/kernel", "dense/bias", "out/bias")


def test_parts_of_a_training_are_joined_under_the_names_of_their_steps():
    first = verdict_on(CLIPPED, step_names={0: "step 1", 1: "step 2", 2: "step 3"})
    found = dataclasses.replace(CLIPPED, stage="evaluation", detail="other_metric", steps=(0,))
    last = verdict_on(
        found, steps=(0,), step_names={0: "an evaluation"}, checked=("evaluation",)
    )  # fmt: skip
    whole = in_sequence([first, last])
    assert whole.steps == (0, 1, 2, 3) and whole.checked[-1] == "evaluation"
    clipped, other = (facts_of(each, whole)["where"].split(";")[0] for each in whole.findings)
    assert (clipped, other) == ("clipping, every step", "evaluation")
    assert record_of(whole)["steps"] == ["step 1", "step 2", "step 3", "an evaluation"]


@pytest.mark.parametrize(
    "steps, text",
    [
        ((1, 2, 3, 4), "steps 1 to 4"), ((1, 2), "step 1, step 2"),
        ((1, 2, 4), "step 1, step 2, step 4"), ((), ""),
    ],
)  # fmt: skip
def test_consecutive_steps_are_joined(steps, text):
    names = [f"step {number}" for number in steps]
    assert ", ".join(named_steps(names)) == text
    assert named_steps([*names, "an evaluation"])[-1] == "an evaluation"


def test_the_json_has_the_stages_and_findings_of_every_source():
    infinite = dataclasses.replace(CLIPPED, distance=float("inf"))
    record = json.loads(verdict_on(infinite, LOCAL).to_json(), parse_constant=pytest.fail)
    assert record["stages"] == {"start": "clean", "forward": "by design", "clipping": "fault"}
    local, clipped = record["findings"]
    assert local["items"] == ["replica 0", "replica 1"] and local["steps"] == ["step 1"]
    assert clipped["distance"] is None and clipped["remedy"].startswith("clip after the sum")


def test_names_of_users_cannot_change_the_terminal():
    hostile = "line\nbreak\x1b[31m"
    found = dataclasses.replace(CLIPPED, tensors=(hostile,), text=hostile)
    assert all(
        line.isprintable()
        for line in describe([verdict_on(found, name=hostile)], details=True).split("\n")
    )


def test_the_largest_difference_is_that_of_a_wrong_array_where_there_is_one():
    measured = [
        Measurement(0, "update", name, "", distance, allowed)
        for name, distance, allowed in (("a", 0.5, 1e-9), ("b", 0.7, 1e-6), ("c", 0.9, 1.0))
    ]
    assert largest_of(measured)["update"] == (measured[1], 0, 3)
    assert largest_of(measured[2:])["update"] == (measured[2], 0, 1)
