"""What people see of a verified case: the lines printed, the figure, the section of the page."""

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image

import report_samples
import test_report
from app.records.case_record import explanations, shortened, stage_status, stages_of, verdict
from app.report.case_plot import plot_case
from app.report.page import REPORT_FILE
from app.verification.case_output import print_case
from conftest import ROOT
from in_process import run_here_ok
from report_samples import CHECKS, CLIPPED, LOCAL, case_run, write_case
from test_report import CHROMIUM, HOSTILE, report

RED, YELLOW, GREEN = (213, 94, 0), (255, 233, 184), (226, 243, 236)
NAMES = (HOSTILE, "line\nbreak\x1b[31m", os.fsdecode(b"bytes \xff"), "W" * 300)


# Sentences


@pytest.mark.parametrize(
    "findings, status, end",
    [
        (
            (),
            "clean",
            "is the training that my_case.py defines on one device: every stage is clean",
        ),
        (
            (LOCAL,),
            "by design",
            "differs by design from the training that my_case.py defines on one device: local"
            " statistics; no fault found",
        ),
        (
            (CLIPPED, {**CLIPPED, "stage": "update", "cause": "not_updated"}, CLIPPED),
            "fault",
            "is not the training that my_case.py defines on one device: clipped before the sum, not"
            " updated",
        ),
        (
            (LOCAL, CLIPPED),
            "fault",
            "is not the training that my_case.py defines on one device: clipped before the sum;"
            " also different by design: local statistics",
        ),
    ],
)
def test_the_verdict_is_one_sentence(findings, status, end):
    run = case_run(*findings)
    assert verdict("keras_fit", run) == (status, f"keras_fit {end}")


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
    print_case(write_case(tmp_path / "run"))
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


def test_long_texts_are_printed_in_lines_of_a_terminal(tmp_path, capsys):
    text = "one of many words " * 20
    print_case(write_case(tmp_path / "run", {"fit": case_run({**CLIPPED, "text": text})}))
    lines = capsys.readouterr().out.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("  why  "))
    assert "".join(lines[at : at + 5]).count("many") == 20
    assert all(len(line) <= 100 for line in lines[1:])
    assert re.match(r" {14}\w", lines[at + 1])


def test_what_is_printed_has_no_control_characters(tmp_path, capsys):
    for name in NAMES:
        found = {**CLIPPED, "tensors": [name], "text": name}
        print_case(write_case(tmp_path / "run", {"fit": case_run(found)}, model=name, case=name))
    told = capsys.readouterr().out
    assert all(line.isprintable() for line in told.split("\n"))
    told.encode("utf-8")


# The figure


def cells(path, colour):
    """Returns how much of a figure has a colour."""
    image = np.asarray(Image.open(path).convert("RGB"), np.int64)
    assert image.shape[1] > 1000
    return float(np.all(np.abs(image - colour) < 3, axis=-1).mean())


def test_the_figure_has_a_cell_for_each_stage_and_strategy(tmp_path):
    write_case(tmp_path / "run")
    plot_case(tmp_path / "run")
    picture = tmp_path / "run" / "verify.png"
    assert cells(picture, RED) > 0.03  # One cell of twelve.
    assert cells(picture, YELLOW) / cells(picture, RED) == pytest.approx(2, rel=0.2)
    assert cells(picture, GREEN) > 5 * cells(picture, RED)
    drawn = (tmp_path / "run" / "verify.svg").read_text(encoding="utf-8")
    for text in ("✗ fault: clipped", "≠ by design: local", "✓ clean", "keras_fit is not the"):
        assert text in drawn
    write_case(tmp_path / "clean", {"single": case_run(replicas=1)})
    plot_case(tmp_path / "clean")
    assert cells(tmp_path / "clean" / "verify.png", RED) == 0
    assert cells(tmp_path / "clean" / "verify.png", GREEN) > 0.3


def test_no_text_of_the_figure_leaves_its_place(tmp_path):
    """Ink to the right of the last cell, or between two cells, would be a text that is too long."""
    long = [{**CLIPPED, "cause": "an_unusually_long_cause_" * 3}, {**CLIPPED, "stage": "update"}]
    names = ("single", "keras_fit", "manual", "mirrored", "multi_worker")
    write_case(tmp_path, dict.fromkeys(names, case_run(*long)), model="W" * 300)
    plot_case(tmp_path)
    image = np.asarray(Image.open(tmp_path / "verify.png").convert("RGB"), np.int64)
    ink = np.any(image != 255, axis=-1)
    assert not ink[:, -8:].any() and not ink[:, :8].any() and not ink[-4:].any()
    red = np.all(np.abs(image - RED) < 3, axis=-1).any(axis=0)
    starts = np.flatnonzero(np.diff(red.astype(int)) == 1)
    rows = np.all(np.abs(image - RED) < 3, axis=-1).any(axis=1)
    assert len(starts) == len(names)
    assert not ink[rows][:, starts[1:] - 2].any()


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_are_drawn_as_text(tmp_path, name):
    found = {**CLIPPED, "tensors": [name], "text": name}
    write_case(tmp_path, {"keras_fit": case_run(found)}, model=name, case=f"folder/{name}.py")
    plot_case(tmp_path)
    root = ElementTree.parse(tmp_path / "verify.svg").getroot()
    assert not [each for each in root.iter() if each.tag.endswith("script")]
    assert Image.open(tmp_path / "verify.png").size[0] < 2000


# The page


@pytest.fixture
def page(tmp_path):
    write_case(tmp_path / "run")
    return report(tmp_path / "run")


def test_the_page_says_the_verdict_first(page):
    words = page.text
    first = words.index(
        "keras_fit is not the training that my_case.py defines on one device: clipped before the"
        " sum; also different by design: local statistics"
    )
    second = words.index(
        "single is the training that my_case.py defines on one device: every stage is clean"
    )
    table = words.index("Stages")
    finding = words.index("keras_fit, fault: clipped before the sum")
    assert first < second < table < finding < words.index("clip after the sum: ")
    assert "all_reduce" in words  # In a font for code.
    assert [attrs["class"] for attrs in page.named("ul") if "class" in attrs] == [
        "items bad", "items differs", "items good"
    ]  # fmt: skip


def test_the_page_has_a_table_of_stages_and_strategies(page):
    rows = page.rows("Stages")
    assert list(rows) == list(CHECKS)
    assert rows["clipping"] == {
        "stage": "clipping", "what is checked": CHECKS["clipping"], "single": "clean",
        "mirrored": "clean", "keras_fit": "fault: clipped before the sum",
    }  # fmt: skip
    assert rows["forward"]["mirrored"] == "by design: local statistics"
    assert rows["start"]["single"] == "–"
    assert page.rows("Environment")["devices"]["value"] == "1 CPU, 2 simulated CPUs"


def test_the_page_explains_each_finding(page):
    words = page.text
    at = words.index("keras_fit, fault: clipped before the sum")
    assert words[at + 1 : at + 5] == [
        "where", "clipping, every step; dense/kernel, dense/bias", "why", CLIPPED["text"]
    ]  # fmt: skip
    assert "mirrored, keras_fit, by design: local statistics" in words
    assert any(text.endswith("bn_11 and 3 more") for text in words)


@pytest.mark.parametrize("name", NAMES)
def test_hostile_names_of_a_case_are_text(tmp_path, name):
    found = {**CLIPPED, "tensors": [name], "text": name, "remedy": name, "replicas": [1]}
    found["steps"] = [name]
    runs = {"keras_fit": case_run(found, steps=[name], model=name, versions={name: name})}
    write_case(tmp_path / "run", runs, model=name, case=f"folder/{name.replace('/', '')}.py")
    page = report(tmp_path / "run")
    assert not {"script", "b"} & {tag for tag, *_ in page.elements}
    shown = "".join(letter if letter.isprintable() else " " for letter in name)
    told = next(text for text in page.text if "every step" in text)
    assert told == f"clipping, every step; replica 1; {shown}".rstrip()
    assert any(text.startswith(f"Model {shown}, batch 8") for text in page.text)


def test_a_case_without_a_verdict_says_so(tmp_path):
    write_case(tmp_path / "run")
    (tmp_path / "run" / "verify.json").unlink()
    assert "This verification is not finished: no verdict yet." in report(tmp_path / "run").text


def test_the_command_report_shows_a_case_beside_other_runs(tmp_path):
    write_case(tmp_path / "case")
    report_samples.write_verification(tmp_path / "proved")
    out = tmp_path / "all.html"
    run_here_ok("report", tmp_path, f"--out={out}")
    text = out.read_text(encoding="utf-8")
    assert "keras_fit is not the training that my_case.py defines on one device" in text
    assert "Pairs of strategies after the last step" in text
    run_here_ok("report", tmp_path / "case")
    assert (tmp_path / "case" / REPORT_FILE).exists()


@pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed")
@pytest.mark.parametrize("width", [360, 1280])
def test_no_sideways_scroll_of_page_or_table(tmp_path, width):
    found = {**CLIPPED, "tensors": ["W" * 400], "text": "W" * 400}
    names = ("single", "keras_fit", "manual", "mirrored", "multi_worker")
    write_case(tmp_path / "run", dict.fromkeys(names, case_run(LOCAL, found)), model="W" * 400)
    report(tmp_path / "run")
    text = (tmp_path / "run" / REPORT_FILE).read_text(encoding="utf-8")
    assert test_report.TestBrowser.scroll_width(text, tmp_path, width) == width
    if width == 1280:
        # Without its own scroll bar the table would widen the page.
        unscrolled = text.replace("overflow-x: auto", "overflow-x: visible")
        assert unscrolled != text
        assert test_report.TestBrowser.scroll_width(unscrolled, tmp_path, width) == width


def test_the_process_that_reports_a_case_does_without_tensorflow(tmp_path):
    """A result comes from a child process: what it is made of must not import TensorFlow here."""
    write_case(tmp_path)
    code = (
        "import pathlib, sys; from app.report.case_plot import plot_case;"
        "from app.verification import case_output, case_result, case_runner;"
        "plot_case(pathlib.Path(sys.argv[1]));"
        "assert not {'tensorflow', 'keras', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "nonsense"}
    subprocess.run([sys.executable, "-c", code, tmp_path], env=environment, check=True)
    assert (tmp_path / "verify.png").exists()
