"""What people see of a verified case: sentences, findings and the lines printed."""

import os
import re

import pytest

from app.verification.case_output import describe_case
from app.verification.case_record import explanations, shortened, stage_status, stages_of, verdict
from report_samples import CHECKS, CLIPPED, LOCAL, case_run, write_case

HOSTILE = "<script>alert(1)<b>\"&'{{ 7 * 7 }} $\\frac$"
NAMES = (HOSTILE, "line\nbreak\x1b[31m", os.fsdecode(b"bytes \xff"), "W" * 300)


# Sentences


@pytest.mark.parametrize(
    "findings, status, end",
    [
        ((), "clean", "every stage is clean"),
        ((LOCAL,), "by design", "on one device: local statistics; no fault found"),
        (
            (CLIPPED, {**CLIPPED, "stage": "update", "cause": "not_updated"}, CLIPPED), "fault",
            "on one device: clipped before the sum, not updated",
        ),
        (
            (LOCAL, CLIPPED), "fault",
            "on one device: clipped before the sum; also different by design: local statistics",
        ),
    ],
)  # fmt: skip
def test_the_verdict_is_one_sentence(findings, status, end):
    found, sentence = verdict("keras_fit", case_run(*findings))
    assert found == status and sentence.startswith("keras_fit ") and sentence.endswith(end)


def test_a_stage_with_a_finding_is_shown_even_if_it_was_not_checked():
    run = case_run({**CLIPPED, "stage": "start"})
    del run["stages"]["start"]
    assert list(stages_of([run])) == list(CHECKS)
    assert stage_status(run, "start") == ("fault", ["clipped before the sum"])


def test_stages_keep_their_order_whichever_strategy_has_them():
    runs = [case_run(replicas=1), case_run()]
    assert list(stages_of(runs)) == list(stages_of(runs[::-1])) == list(CHECKS)
    assert list(stages_of(runs[:1])) == list(CHECKS)[1:]
    assert stage_status(runs[0], "start") == ("–", [])


def test_findings_say_where_why_and_what_to_do():
    fault, by_design = explanations({"keras_fit": case_run(LOCAL, CLIPPED)})
    assert (fault.status, fault.title) == ("fault", "keras_fit, fault: clipped before the sum")
    assert fault.facts == {
        "where": "clipping, every step; dense/kernel, dense/bias",
        "why": CLIPPED["text"],
        "remedy": CLIPPED["remedy"],
        "difference": "up to 0.47, relative; rounding allows 1e-05",
    }
    assert by_design.facts["where"] == (
        "forward, step 2; replicas 0, 1; bn_0, bn_1, bn_2 and 12 more"
    )
    assert "difference" not in by_design.facts


@pytest.mark.parametrize("steps", [["step 1", "an evaluation"], ["an evaluation"]])
def test_a_finding_of_an_evaluation_is_of_no_step(steps):
    found = {**CLIPPED, "stage": "evaluation", "steps": ["an evaluation"], "tensors": ["loss"]}
    (explained,) = explanations({"fit": case_run(found, steps=steps)})
    assert explained.facts["where"] == "evaluation; loss"


def test_equal_findings_of_several_strategies_are_explained_once():
    runs = {"manual": case_run(LOCAL), "mirrored": case_run(LOCAL, {**LOCAL, "text": "other"})}
    titles = [each.title for each in explanations(runs)]
    assert titles == [
        "manual, mirrored, by design: local statistics", "mirrored, by design: local statistics"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "steps, text",
    [
        ((1, 2, 3, 4), "steps 1 to 4"), ((1, 2), "step 1, step 2"),
        ((1, 2, 4), "step 1, step 2, step 4"), ((), ""),
    ],
)  # fmt: skip
def test_consecutive_steps_are_joined(steps, text):
    names = [f"step {number}" for number in steps]
    assert ", ".join(shortened(names)) == text
    assert shortened([*names, "an evaluation"])[-1] == "an evaluation"


# The terminal


def test_verdicts_are_printed_before_tables_and_findings(tmp_path, capsys):
    describe_case(write_case(tmp_path / "run")).print()
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines[:3]] == ["single", "mirrored", "keras_fit"]
    assert lines[2].endswith("local statistics") and lines[3] == ""
    assert "  steps       steps 1 to 3, an evaluation" in lines
    (row,) = [line for line in lines if line.startswith("  clipping ")]
    assert row.split() == ["clipping", "clean", "clean", "✗", "fault"]
    titles = [line for line in lines if re.match(r"\w.*, (fault|by design):", line)]
    assert titles == [
        "keras_fit, fault: clipped before the sum",
        "mirrored, keras_fit, by design: local statistics",
    ]
    at = lines.index(titles[0])
    assert [line.split()[0] for line in lines[at + 1 : at + 5]] == [
        "where", "why", "remedy", "difference"
    ]  # fmt: skip


def test_what_is_printed_has_no_control_characters(tmp_path, capsys):
    for name in NAMES:
        found = {**CLIPPED, "tensors": [name], "text": name}
        record = write_case(tmp_path / "run", {"fit": case_run(found)}, model=name, case=name)
        describe_case(record).print()
    told = capsys.readouterr().out
    assert all(line.isprintable() for line in told.split("\n"))
    told.encode("utf-8")
