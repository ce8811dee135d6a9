"""What people see of `verify`: the lines printed, the figure, `verify.json`."""

import dataclasses
import json
import os
import re

import jsonschema
import pytest

from app.report import plot_style
from app.runtime.errors import DataError, MismatchError
from app.verification.output import IDENTICAL, Pair, Results, describe, outcome_sentences, report
from lockstep.answer.text import CLAUSES
from lockstep.answer.verdict import EXIT_CODE_OF, NOT_VERIFIED, STAGES
from tests.cli.report_samples import CLIPPED, LOCAL, make_run, write_run, write_verification
from tests.conftest import ROOT

NAMES = ("line\nbreak\x1b[31m", os.fsdecode(b"bytes \xff"), "$\\frac$", "W" * 300)
RUNS = {
    "single": make_run(name="single", replicas=1),
    "mirrored": make_run(LOCAL, name="mirrored"),
    "keras_fit": make_run(LOCAL, CLIPPED, name="keras_fit"),
}


def lines_of(capsys, result):
    result.print()
    return capsys.readouterr().out.splitlines()


def test_verdicts_are_printed_before_tables_and_findings(capsys):
    lines = lines_of(capsys, describe(Results(RUNS, setup={"model": "network"})))
    assert [line.partition(" ")[0] for line in lines[:3]] == [*RUNS]
    assert lines[2].endswith("local statistics") and lines[3] == ""
    assert "  verified    steps 0 to 2, an evaluation" in lines
    rows = {line.split()[0]: line.split()[1:] for line in lines if line.startswith("  ")}
    assert rows["clipping"] == ["clean", "clean", "✗", "fault", "the", "clipped", "sum"]
    assert rows["start"][:3] == ["–", "clean", "clean"] and "begin" in rows["start"]
    titles = [line for line in lines if re.match(r"\w.*, (fault|by design):", line)]
    assert titles == [
        "keras_fit, fault: other clipping (before the sum)",
        "mirrored, keras_fit, by design: local statistics",
    ]
    at, end = map(lines.index, titles)
    labels = [line.split()[0] for line in lines[at + 1 : end] if re.match(r"  \w", line)]
    assert labels == ["where", "why", "remedy", "difference"]


@pytest.mark.parametrize("status", [status for status, code in EXIT_CODE_OF.items() if code == 3])
def test_what_was_not_verified_is_an_error_and_said_first(tmp_path, capsys, status):
    note = "steps differ in their random numbers"
    found = dataclasses.replace(LOCAL, status=status)
    run = make_run(*([] if status == NOT_VERIFIED else [found]), name="mirrored")
    why = ("the training ended",) if status == NOT_VERIFIED else ()
    verdict = dataclasses.replace(run.verdict, notes=(note,), unverified=why)
    runs = {"mirrored": dataclasses.replace(run, verdict=verdict)}
    with pytest.raises(DataError, match=f"^{status} in mirrored; see"):
        write_run(tmp_path / "run", runs)
    sentence, *lines = lines_of(capsys, describe(Results(runs)))
    assert status in sentence and f"mirrored: {note}" in lines[:2]


def test_every_file_of_a_verification(tmp_path, capsys):
    write_verification(tmp_path / "run", fault="drop_gradient:replica=1")
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names == {"config.json", "report.html", "verify.json", "verify.png", "verify.svg"}
    text = (tmp_path / "run" / "verify.json").read_text()
    record = json.loads(text, parse_constant=pytest.fail)
    assert (record["format"], record["version"], record["model"]) == ("lockstep verify", 3, "lenet")
    schema = json.loads((ROOT / "lockstep" / "verify.schema.json").read_text("utf-8"))
    jsonschema.validate(record, schema)
    assert record["exit_code"] == MismatchError.exit_code
    manual = record["trainings"]["manual"]
    assert manual["findings"][0]["detail"] == "lost_replica" and manual["about"].startswith("2 sh")
    assert len({len(column) for column in manual["measurements"].values()}) == 1
    assert record["pairs"][0]["outcome"] == "different"
    figure = (tmp_path / "run" / "verify.svg").read_text()
    assert "injected fault: drop_gradient" in figure and "manual is not the training" in figure
    assert "manual, all-reduce: 1 of 5 arrays beyond rounding" in figure
    assert "manual, other stages (gradients, update): within rounding, 0 of 8" in figure
    assert "mirrored, all stages (gradients, all-reduce, update): within rounding, 12 of" in figure
    with pytest.raises(MismatchError, match=r"^mismatch in keras_fit; see .*report.html$"):
        report(tmp_path, Results(RUNS))
    assert "verify.png" not in capsys.readouterr().out


def test_one_panel_shows_that_all_stages_are_right(tmp_path):
    """Arrays that are bitwise equal have a place of their own, below what was measured."""
    write_verification(tmp_path / "run")
    figure = (tmp_path / "run" / "verify.svg").read_text("utf-8")
    assert figure.count("<!-- bitwise equal -->") == figure.count("<!-- 0.1 -->") == 1
    assert "manual: 0 of 12 arrays bitwise equal" in figure
    assert "mirrored: 12 of 12 arrays bitwise equal" in figure and "beyond rounding" not in figure


def test_every_stage_has_a_clause_that_fits_beside_it():
    assert [*CLAUSES] == [*STAGES]
    assert max(map(len, CLAUSES.values())) < 35


def test_the_table_has_the_array_that_is_closest_to_its_tolerance(tmp_path, monkeypatch):
    monkeypatch.setattr(plot_style, "render", lambda figure, suffix: b"")
    write_verification(tmp_path / "run")
    shown = json.loads((tmp_path / "run" / "verify.json").read_text())["shown"]
    *_, table, _, last = shown["blocks"]
    assert table["rows"][0] == ["manual", "gradients", "2.5e-08", "1e-07", "25%", "–"]
    assert [row[0] for row in table["rows"]] == ["manual", "", ""]
    assert last == "mirrored: all 12 arrays bitwise equal to one device"


def test_names_of_users_cannot_change_the_terminal(capsys):
    for name in NAMES:
        found = dataclasses.replace(CLIPPED, tensors=(name,), text=name)
        run = make_run(found, name=name, about=name, tolerance=name)
        lines = lines_of(capsys, describe(Results({name: run}, setup={name: name})))
        assert all(line.isprintable() for line in lines)


def test_many_pairs_are_told_by_their_outcome():
    def told(*outcomes):
        return outcome_sentences([Pair(tuple(pair), outcome) for pair, outcome in outcomes])

    few = ("ab", IDENTICAL), ("ac", "different"), ("bc", "different")
    assert told(*few) == ["a and b: bit-identical", "a and c: different", "b and c: different"]
    same = [(pair, IDENTICAL) for pair in ("ab", "ac", "bc", "ad")]
    assert told(*same) == ["bit-identical: all pairs"]
    listed = ["bit-identical: a – b, a – c, b – c, a – d", "different: b – d"]
    assert told(*same, ("bd", "different")) == listed
