"""Tests `report.html`: the rows of the console, verdicts, caveats, hostile names, and refusals."""

import dataclasses
import html.parser
import itertools
import json
import os
import random
import re
import shutil

import pytest

from app.options import Config
from app.records.caveats import DATASET_CAVEATS, TIMING_CAVEAT
from app.records.files import read_json
from app.records.history import load_summary
from app.report import plot_style
from app.report.page import REPORT_FILE, find_records, write_report
from app.report.result import Result, Table
from app.report.training_result import settings_table
from app.runtime.errors import OutputError
from lockstep.answer.verdict import Measurement
from tests.cli import report_samples
from tests.cli.report_samples import CLIPPED, make_run, write_case, write_config
from tests.conftest import ROOT, assert_ok, run_python

VOID = {"meta", "link", "br", "img"}
HOSTILE = "<script>alert(1)<b>\"&'{{ 7 * 7 }} $\\frac$"
MEASURED = [("compared", "compare"), ("refuted", "verify"), ("case", "verify"),
            ("measured", "benchmark")]  # fmt: skip


class Page(html.parser.HTMLParser):
    """A page taken apart; raises where a tag is not closed as it was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.rows, self.marked = [], [], [], []
        self.text = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append((tag, dict(attrs).get("class", "")))
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "p":
            self.marked.append([dict(attrs).get("class", ""), ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        tags = [tag for tag, _ in self.open]
        if "td" in tags or "th" in tags:
            self.rows[-1][-1] += data
        elif "p" in tags:
            self.marked[-1][1] += data
        if data.strip():
            self.text.append(" ".join(data.split()))

    def paragraphs(self, name):
        return [text for each, text in self.marked if name in each.split()]


def report(*directories, out=None):
    out = out or directories[0] / REPORT_FILE
    write_report(directories, out)
    return Page(out.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report") / "runs"
    folder.mkdir()
    report_samples.write_everything(folder)
    (folder / "notes").mkdir()
    (folder / "notes" / "config.json").write_text('{"of": "another program"}')
    return folder


@pytest.fixture(scope="module")
def page(everything):
    return report(everything)


@pytest.fixture
def no_figures(monkeypatch):
    """Leaves the drawing out, a quarter of the time."""
    monkeypatch.setattr(plot_style, "render", lambda figure, suffix: b"<svg/>")


@pytest.mark.parametrize("name, command", MEASURED)
def test_the_page_has_the_rows_and_sentences_that_the_console_prints(
    everything, page, capsys, name, command
):
    result = Result.from_record(read_json(everything / name / f"{command}.json")["shown"])
    result.print()
    printed = capsys.readouterr().out
    tables = [block for block in result.blocks if isinstance(block, Table)]
    assert tables and all(table.rows for table in tables)
    for row in (row for table in tables for row in [table.header, *table.rows]):
        assert list(row) in page.rows
        assert re.search(" +".join(map(re.escape, filter(None, row))), printed)
    for _, sentence in result.verdicts:
        assert sentence in printed and f"{name}: {sentence}" in map(str, page.text)


def test_verdicts_are_green_and_red_and_come_first(page):
    good, bad, by_design = map(page.paragraphs, ("good", "bad", "design"))
    assert any(text.startswith("proved: manual is the training on one device") for text in good)
    assert any(text.startswith("compared: manual and mirrored end with") for text in good)
    assert "refuted: manual is not the training on one device: lost part (replica)" in bad
    assert any(text.startswith("case: keras_fit is not the training") for text in bad)
    assert any(text.startswith("case: mirrored differs by design") for text in by_design)
    assert page.marked[1][0].startswith("verdict")  # After the line with the names.
    assert ["clipping", "clean", "clean", "✗ fault", "the clipped sum"] in page.rows
    at = page.text.index("keras_fit, fault: other clipping (before the sum)")
    assert page.text[at + 1 : at + 5] == [
        "where", "clipping, every step; dense/kernel, dense/bias", "why", CLIPPED.text
    ]  # fmt: skip


@pytest.mark.usefixtures("no_figures")
def test_caveats_come_with_the_names_of_their_runs(page, tmp_path):
    caveats = page.paragraphs("caveat")
    fault = "injected fault: drop_gradient:replica=1; the result is wrong on purpose"
    assert f"{fault} (refuted, faulty)" in caveats
    assert any(text.startswith(DATASET_CAVEATS["synthetic"]) for text in caveats)
    assert f"{TIMING_CAVEAT} (generated)" in caveats
    report_samples.write_training(tmp_path / "run")
    assert report(tmp_path / "run").paragraphs("caveat") == []


def test_trainings_have_their_results_settings_and_curves(everything, page):
    summary = load_summary(everything / "generated")
    (row,) = [row for row in page.rows if row[0] == "generated"]
    assert row[1:4] == ["2 simulated", f"{summary.test_accuracy:.4f}", f"{summary.epoch_sec:.2f}"]
    assert "begun: no epoch is finished yet" in page.text
    assert "generated: changed on the way: recipe d2l → fast" in page.text
    assert "bitwise identical weights: compared/manual, compared/mirrored" in page.text
    assert any(row[0] == "≠ strategy" for row in page.rows)
    settings = {"seed": 0, "lr": 0.1, "cases": ["a", "b"]}
    table = settings_table({"a": settings, "b": settings | {"lr": 0.2, "seed": None}})
    rows = [["≠ seed", "0", "–"], ["≠ lr", "0.1", "0.2"], ["cases", "a, b", "a, b"]]
    assert table.rows == rows
    sources = [attrs["src"] for tag, attrs in page.elements if tag == "img"]
    assert sources and all(each.startswith("data:image/svg+xml;base64,") for each in sources)


def test_the_page_is_whole_and_asks_for_nothing(everything, page):
    text = (everything / REPORT_FILE).read_text(encoding="utf-8")
    tags = {tag for tag, _ in page.elements}
    assert not {"script", "iframe", "object"} & tags
    policy = next(a["content"] for tag, a in page.elements if tag == "meta" and "http-equiv" in a)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert all(attrs.get("href", "data:,") == "data:," for _, attrs in page.elements)
    assert not re.search(r"url\(|@import|https?://", text)
    made = re.compile("Made [^ ]+ [^ ]+ [^ ]+ ")
    again = everything.parent / "again.html"
    write_report([everything], again)
    assert made.sub("", again.read_text(encoding="utf-8")) == made.sub("", text)


def test_hostile_names_are_text(tmp_path):
    folder = tmp_path / HOSTILE
    report_samples.write_training(folder, model=HOSTILE, versions={HOSTILE: HOSTILE})
    report_samples.write_training(tmp_path / "other", changes=[HOSTILE], strategy=HOSTILE)
    report_samples.write_training(tmp_path / os.fsdecode(b"run \xff"))
    found = dataclasses.replace(CLIPPED, tensors=(HOSTILE,), text=HOSTILE)
    one = Measurement(0, "clipping", HOSTILE, HOSTILE, 1.0, 0.5)
    run = make_run(found, name=HOSTILE, tolerance=HOSTILE, measurements=(one,))
    write_case(tmp_path / "case", {HOSTILE: run}, model=HOSTILE)
    page = report(tmp_path)
    assert not {"script", "b"} & {tag for tag, _ in page.elements}
    assert {HOSTILE, "run ?"} <= {row[0] for row in page.rows}
    assert any(row[1:2] == [HOSTILE] for row in page.rows)  # The strategy of the case.


def test_several_directories_from_elsewhere_without_tensorflow(tmp_path):
    for name in ("a", "b"):
        report_samples.write_training(tmp_path / name)
    code = (
        "import sys; from app.options import Config; from app.commands.report import run;"
        "run(Config.of('report', directories=tuple(sys.argv[1:])));"
        "assert not {'tensorflow', 'keras', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    (tmp_path / "here").mkdir()
    environment = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "nonsense"}
    arguments = "-c", code, tmp_path / "a", tmp_path / "b"
    assert_ok(run_python(*arguments, cwd=tmp_path / "here", env=environment))
    assert (tmp_path / "here" / REPORT_FILE).exists()


@pytest.mark.usefixtures("no_figures")
def test_which_records_a_page_is_made_of(tmp_path, capsys):
    report_samples.write_comparison(tmp_path / "c")
    report_samples.write_training(tmp_path / "c" / "multi_worker")  # Of an older comparison.
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    (tmp_path / "broken").symlink_to("nowhere")
    page = report(tmp_path / "c")  # Its trainings stand once in its section.
    assert [tag for tag, _ in page.elements].count("section") == 1
    assert [tag for tag, _ in page.elements].count("img") == 1
    assert [row[0] for row in page.rows].count("manual") == 1
    assert "bitwise identical weights: c/manual, c/mirrored" in page.text
    capsys.readouterr()
    found = find_records([tmp_path, tmp_path / "c" / "manual"])
    assert [record.label for record in found] == ["c", "c/single", "c/manual", "c/mirrored"]
    assert [record.command for record in found] == ["compare", "train", "train", "train"]
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "ignored bert" in told
    (tmp_path / "c" / "compare.json").unlink()
    two = {"strategies": ("single", "manual")}
    write_config(tmp_path / "c", Config.of("compare", **two), strategy="single,manual")
    assert "Not finished: there is no result yet." in report(tmp_path / "c").text
    names = ("manual", REPORT_FILE, "single")  # `runs/*` may hold an earlier report.
    page = report(*(tmp_path / "c" / name for name in names), out=tmp_path / "new" / "r.html")
    assert {"manual", "single"} <= {row[0] for row in page.rows}


@pytest.mark.usefixtures("no_figures")
def test_a_report_is_replaced_but_no_other_file(tmp_path):
    report_samples.write_training(tmp_path / "run")
    for _ in range(2):
        report(tmp_path / "run", out=tmp_path / "real.html")
    (tmp_path / "link.html").symlink_to("real.html")
    (tmp_path / "empty.html").touch()
    (tmp_path / "own.html").write_text("<html>")
    for name in ("link", "empty", "own"):
        before = (tmp_path / f"{name}.html").read_bytes()
        with pytest.raises(OutputError):
            write_report([tmp_path / "run"], tmp_path / f"{name}.html")
        assert (tmp_path / f"{name}.html").read_bytes() == before


def leaves(value, path=()):
    """Yields where every value of a record is; of long lists the first two."""
    if path:
        yield path
    keys = range(min(2, len(value))) if isinstance(value, list) else ()
    for key in value if isinstance(value, dict) else keys:
        yield from leaves(value[key], (*path, key))


@pytest.mark.parametrize("name, command", [("refuted", "verify"), ("generated", "summary")])
@pytest.mark.usefixtures("no_figures")
def test_whatever_a_record_holds_it_is_shown_or_refused(everything, tmp_path, name, command):
    run = tmp_path / "run"
    shutil.copytree(everything / name, run)
    path = run / f"{command}.json"
    record, outcomes = read_json(path), set()
    places = [each for each in leaves(record) if command == "summary" or each[0] == "shown"]
    tried = itertools.product(places, (None, "x", -1.5, [], {"a": 1}))
    for where, other in random.Random(0).sample([*tried], 12):
        damaged = at = json.loads(json.dumps(record))
        for key in where[:-1]:
            at = at[key]
        at[where[-1]] = other
        path.write_text(json.dumps(damaged))
        try:
            write_report([run], tmp_path / REPORT_FILE)
            outcomes.add("shown")
        except OutputError:
            outcomes.add("refused")
    assert outcomes == {"shown", "refused"}
    path.write_text(json.dumps(record)[:-10])
    with pytest.raises(OutputError, match=re.escape(path.name)):
        write_report([run], tmp_path / REPORT_FILE)
