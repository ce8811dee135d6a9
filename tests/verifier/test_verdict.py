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
    MEANINGS,
    MERGED,
    MODULES,
    UNEXPLAINED,
    cause_of,
    code_of,
    remedy_of,
    words_of,
)
from lockstep.answer.json import record_of
from lockstep.answer.text import (
    advice_of,
    describe,
    explanations,
    facts_lines,
    facts_of,
    largest_of,
    line_of,
    named_steps,
    sentence_of,
)
from lockstep.answer.verdict import STAGES, Measurement, Verdict, finding_of, in_sequence, merged
from tests.cli.report_samples import CLIPPED, LOCAL
from tests.conftest import ROOT


def verdict_on(*findings, **changes):
    given = {
        "name": "fit", "reference": "training that a.py defines on one device",
        "steps": (0, 1, 2), "num_replicas": 2, "findings": merged(findings),
        "checked": ("start", "forward", "clipping"), "tolerance": "float64", "framework": "keras",
    }  # fmt: skip
    return Verdict(**given | changes)


def test_every_detail_has_a_cause_and_a_remedy():
    assert len(DETAILS) == 124
    for framework, remedies in IN_FRAMEWORK.items():
        assert remedies.keys() <= DETAILS.keys()
        for detail, remedy in DETAILS.items():
            assert remedy_of(detail, framework) and remedy_of(detail, "another") == remedy
    for framework, changes in CODE.items():
        assert changes.keys() <= DETAILS.keys() and all(new for _, new in changes.values())
        assert all(ast.parse(line) for lines in changes.values() for line in filter(None, lines))
        assert "+" in code_of(next(iter(changes)), framework) and not code_of("x", framework)
    assert {cause_of(detail) for detail in DETAILS} == {*CAUSES} == {*MEANINGS} and len(
        CAUSES
    ) <= 70
    assert len({words_of(detail) for detail in DETAILS}) == 124
    for cause, details in MERGED.items():
        assert len(details) > 1 and {*map(cause_of, details)} == {cause}
        # The cause alone says the detail only if that is its whole kind, or a new name of it.
        assert sum(not words for words in details.values()) <= 1
        assert all(words or cause not in DETAILS or d == cause for d, words in details.items())
    with pytest.raises(KeyError, match="no_such_name"):
        finding_of("update", "no_such_name", "the text", (0,))


def test_a_place_without_a_mistake_has_a_remedy_of_its_own():
    assert UNEXPLAINED.keys() < STAGES.keys()
    for stage, remedy in UNEXPLAINED.items():
        found = verdict_on(finding_of(stage, "unexplained", "the text", (0,)))
        assert advice_of(found.findings[0], found) == remedy
    where = finding_of("forward", "other_outputs", "the text", (0,))
    usual = remedy_of("other_outputs", "torch")
    for finding, framework, has_modules in (
        (where, "torch", True), (where, "jax", False),
        (dataclasses.replace(where, module="layers.0"), "torch", False),
    ):  # fmt: skip
        advice = advice_of(finding, verdict_on(finding, framework=framework))
        assert advice == usual + MODULES * has_modules
    assert remedy_of("frozen", "torch", "", "gradients") == remedy_of("frozen", "torch")


NEW = (  # Since version 3 of the JSON.
    *("other_tying", "other_augmentation", "weights_not_synchronised", "other_temperature"),
    *("other_positions", "updated_from_a_part"),
)


def test_the_changelog_has_the_table_of_names():
    lines = ["| Cause | Details: the causes of version 2 |", "| --- | --- |"]
    lines += [
        f"| `{c}` | {', '.join(f'`{d}`' for d in MERGED[c])} |" for c in CAUSES if c in MERGED
    ]
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "\n".join(["", *lines, ""]) in changes
    kept = ", ".join(f"`{cause}`" for cause in CAUSES if cause not in (*MERGED, *NEW))
    assert f"Unchanged, with `detail` equal to `cause`: {kept}.\n" in changes


def test_the_verdict_is_one_sentence():
    same = Measurement(0, "update", "w", "replica 0", 0.0, 1e-7, True)
    near = dataclasses.replace(same, same_bits=False)
    clean = "on one device: every checked stage is clean"
    for findings, measured, status, end in (
        ((), (), "clean", clean),
        ((), (same,), "clean", f"{clean}, bit for bit"),
        ((), (same, near), "clean", clean),
        ((LOCAL,), (), "by design", "one device: local statistics; no fault found"),
        (
            (LOCAL, CLIPPED), (), "fault",
            "other clipping (before the sum); also different by design: local statistics",
        ),
    ):  # fmt: skip
        verdict = verdict_on(*findings, measurements=measured)
        assert (verdict.status, verdict.ok) == (status, status != "fault")
        assert sentence_of(verdict).startswith("fit ") and sentence_of(verdict).endswith(end)
        assert sentence_of(dataclasses.replace(verdict, reference="")).startswith("fit has ")


def test_findings_say_where_why_and_what_to_do():
    verdict = verdict_on(CLIPPED, LOCAL)
    assert facts_of(CLIPPED, verdict) == {
        "where": "clipping, every step; dense/kernel, dense/bias",
        "why": CLIPPED.text,
        "remedy": IN_FRAMEWORK["keras"]["clipped_before_the_sum"],
        "difference": "up to 0.47, relative; rounding allows 1e-05",
    }
    assert facts_of(LOCAL, verdict)["where"] == (
        "forward, step 1; replicas 0, 1; bn_0, bn_1, bn_2 and 12 more"
    )
    from_zero = dataclasses.replace(CLIPPED, distance=2.4e35)
    assert facts_of(from_zero, verdict_on(from_zero))["difference"] == "not 0, as it should be"
    told, with_details = describe([verdict]), describe([verdict], details=True)
    assert told.startswith(sentence_of(verdict)) and "rounding allows" not in told
    lines = with_details.splitlines()
    assert "rounding allows" in with_details and "fit: 3 steps on 2 replicas" in lines
    assert "  tolerances      float64" in lines
    (stage,) = (line for line in lines if line.startswith("  start"))
    assert stage.split(":")[0].endswith(" clean")
    in_line = line_of(CLIPPED, verdict)
    assert in_line.startswith("other clipping (before the sum) in clipping, every step")


def test_a_finding_may_have_a_module():
    first = dataclasses.replace(CLIPPED, module="layers.3, backward")
    again = dataclasses.replace(first, stage="update", detail="frozen")
    verdict = verdict_on(first, again)
    assert first.module in facts_of(first, verdict)["where"].split("; ")
    assert record_of(verdict)["findings"][0]["module"] == first.module
    told = sentence_of(verdict)
    assert told.endswith(": other clipping (before the sum) (layers.3, backward), frozen")


def test_a_cause_in_several_stages_is_explained_once():
    lost = dataclasses.replace(CLIPPED, stage="update", text="the weights differ", steps=(1,))
    same = dataclasses.replace(CLIPPED, stage="agreement", tensors=(), module="a, forward")
    here = dataclasses.replace(CLIPPED, module="a, forward")
    verdict = verdict_on(LOCAL, here, lost, same)
    (fault, facts), (design, local) = explanations([verdict])
    title = "fault: other clipping (before the sum)"
    assert (fault, design) == (f"fit, {title}", "fit, by design: local statistics")
    assert facts["why"] == CLIPPED.text and local == facts_of(LOCAL, verdict)
    assert facts["also update"] == "step 1; dense/kernel, dense/bias: the weights differ"
    assert "a, forward" in facts["where"] and facts["also agreement"] == "every step"
    (both, _), _ = explanations([verdict, dataclasses.replace(verdict, name="again")])
    assert both == f"fit, again, {title}"


def test_findings_of_all_steps_replicas_and_tensors_are_one():
    again = dataclasses.replace(CLIPPED, steps=(4,), items=("replica 1",), tensors=("out/bias",))
    found, local = merged([LOCAL, CLIPPED, again])  # In the order of their first steps.
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


def test_consecutive_steps_are_joined():
    for steps, text in (
        ((1, 2, 3, 4), "steps 1 to 4"), ((1, 2), "step 1, step 2"),
        ((1, 2, 4), "step 1, step 2, step 4"), ((), ""),
    ):  # fmt: skip
        names = [f"step {number}" for number in steps]
        assert ", ".join(named_steps(names)) == text
        assert named_steps([*names, "an evaluation"])[-1] == "an evaluation"


def test_the_json_has_the_stages_and_findings_of_every_source():
    infinite = dataclasses.replace(CLIPPED, distance=float("inf"))
    record = json.loads(verdict_on(infinite, LOCAL).to_json(), parse_constant=pytest.fail)
    assert record["stages"] == {"start": "clean", "forward": "by design", "clipping": "fault"}
    clipped, local = record["findings"]
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
    right = dataclasses.replace(measured[0], allowed=0.55)
    assert largest_of([right, measured[2]])["update"] == (right, 0, 2)
    equal = dataclasses.replace(right, same_bits=True)
    told = describe([verdict_on(measurements=(right, equal))], details=True)
    assert "differs by 0.5, rounding allows 0.55; 1 of 2 bitwise equal" in " ".join(told.split())


def test_a_long_name_has_a_line_of_its_own():
    assert facts_lines("of", {"a": "1", "b" * 20: "2"}, 10) == [
        "of", "  a  1", "  " + "b" * 20, "     2",
    ]  # fmt: skip
