"""The comparison of runs, `report.html` and the page of verdicts: verdicts, caveats, refusals."""

import dataclasses
import json
import os
import re
import shutil
from xml.etree import ElementTree

import numpy as np
import pytest

from app.commands.compare import compare_weights
from app.errors import DataError, OutputError
from app.records.checkpoint import Checkpoint
from app.records.files import read_json
from app.records.history import DATASET_CAVEATS, TIMING_CAVEAT
from app.report import plots
from app.report.page import REPORT_FILE, pairs_verdict, results_table, write_report
from lockstep.__main__ import main
from tests.cli import report_samples
from tests.cli.report_samples import write_config, write_verification
from tests.conftest import ROOT, assert_ok, run_python
from tests.training.test_checkpoint import RUN_METADATA, STATE, make_history
from tests.training.test_records import make_summary
from tests.verifier.trainer import Script

WEIGHTS = "logits/kernel"
HOSTILE = "<script>alert(1)<b>\"&'{{ 7 * 7 }} $\\frac$"


class Page:
    """What a page has; raises where a tag is not closed as it was opened."""

    def __init__(self, text):
        closed = re.sub("<((?:meta|link|img) [^>]*)>", r"<\1/>", text)
        self.root = ElementTree.fromstring(closed)
        self.text = [*self.root.itertext()]
        self.tags = [element.tag for element in self.root.iter()]
        self.rows = [["".join(cell.itertext()) for cell in row] for row in self.root.iter("tr")]

    def row(self, name):
        return next(row for row in self.rows if row[0] == name)

    def paragraphs(self, name=""):
        found = [each for each in self.root.iter("p") if name in f" {each.get('class')}".split(" ")]
        return ["".join(each.itertext()) for each in found]


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
    monkeypatch.setattr(plots, "render", lambda figure, suffix: b"<svg/>")


def test_verdicts_are_green_and_red_and_come_with_their_numbers(page):
    good, bad = map(page.paragraphs, ("good", "bad"))
    assert "mirrored is the training on one device: no difference beyond rounding" in good
    assert any(text.startswith("manual and mirrored end with bitwise") for text in good)
    assert "bitwise identical weights: manual, mirrored" in page.text
    (wrong,) = [text for text in bad if text.startswith("manual is not the training on one")]
    assert wrong.endswith("part of the batch lost in step 1 (sum)")
    assert ["sum", "0.05", "0.05"] in page.rows
    assert "the gradient of rank 1 does not count" in page.text
    assert page.row("single – manual")[1:] == ["different, as expected", "0.25", "0.5", WEIGHTS]
    assert page.row("manual on 2 devices")[1:4] == ["1,500", "1,500–1,500", "1.500"]


@pytest.mark.usefixtures("no_figures")
def test_trainings_have_their_results_settings_curves_and_caveats(page, tmp_path):
    assert page.row("generated")[1:4] == ["2 simulated", "0.7500", "2.50"]
    assert "begun: no epoch is finished yet" in page.text and page.row("≠ strategy")
    assert any(text.startswith("faulty: not finished, 1 of 4") for text in page.text)
    sources = [image.get("src") for image in page.root.iter("img")]
    assert sources and all(each.startswith("data:image/svg+xml;base64,") for each in sources)
    caveats = page.paragraphs("caveat")
    fault = "injected fault: drop_gradient:replica=1; the result is wrong on purpose"
    assert f"{fault} (faulty)" in caveats and f"{TIMING_CAVEAT} (generated)" in caveats
    assert any(text.startswith(DATASET_CAVEATS["synthetic"]) for text in caveats)
    report_samples.write_training(tmp_path / "run")
    assert report(tmp_path / "run").paragraphs("caveat") == []


def test_the_page_is_whole_and_asks_for_nothing(everything, page):
    text = (everything / REPORT_FILE).read_text(encoding="utf-8")
    assert not {"script", "iframe", "object"} & {*page.tags}
    policy = page.root.find("head/meta[@http-equiv]").get("content")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert not re.search(r"url\(|@import|https?://", text)


def test_hostile_names_are_text(tmp_path):
    config = {"model": HOSTILE, "strategy": HOSTILE}
    report_samples.write_training(tmp_path / HOSTILE, config=config, versions={HOSTILE: HOSTILE})
    report_samples.write_training(tmp_path / os.fsdecode(b"run \xff"))
    write_verification(tmp_path / "v", fault=HOSTILE, facts={HOSTILE: [HOSTILE]})
    page = report(tmp_path)
    assert not {"script", "b"} & {*page.tags}
    assert page.row(HOSTILE) and page.row("run ?") and HOSTILE in page.text


def test_a_report_imports_no_tensorflow(tmp_path):
    report_samples.write_training(tmp_path / "run")
    code = (
        "import sys; from app.options import Config; from app.commands.report import run;"
        "run(Config.of('report', directories=tuple(sys.argv[1:])));"
        "assert not {'tensorflow', 'keras', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    environment = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "nonsense"}
    assert_ok(run_python("-c", code, tmp_path / "run", cwd=tmp_path, env=environment))
    assert (tmp_path / "run" / REPORT_FILE).exists()


@pytest.mark.usefixtures("no_figures")
def test_which_records_a_page_is_made_of(tmp_path):
    report_samples.write_comparison(tmp_path / "c")
    report_samples.write_training(tmp_path / "c" / "multi_worker")  # Of an older comparison.
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text("{}")
    (tmp_path / "broken").symlink_to("nowhere")
    page = report(tmp_path / "c")  # Its trainings stand once in its section.
    assert page.tags.count("section") == page.tags.count("img") == 1
    assert [row[0] for row in page.rows].count("manual") == 1
    page = report(tmp_path, tmp_path / "c" / "manual", out=tmp_path / "all.html")
    assert page.paragraphs()[0].endswith(" from c, c/single, c/manual, c/mirrored.")
    (tmp_path / "c" / "compare.json").unlink()
    write_config(tmp_path / "c", "compare", strategies=["single"])
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


@pytest.mark.parametrize(
    ("name", "file", "changes"),
    [
        ("refuted", "verify", {"trainings": []}),
        ("refuted", "verify", {"pairs": [{"trainings": None}]}),
        ("generated", "summary", {"devices": -1.5}),
        ("generated", "summary", {"epoch_sec": "x"}),
        ("compared", "compare", {"pairs": {"a": 1}}),
        ("measured", "benchmark", {"cases": [None]}),
    ],
)
@pytest.mark.usefixtures("no_figures")
def test_a_damaged_record_is_refused_by_name(everything, tmp_path, name, file, changes):
    run = shutil.copytree(everything / name, tmp_path / "run")
    path = run / f"{file}.json"
    path.write_text(json.dumps(read_json(path) | changes))
    with pytest.raises(OutputError, match=rf"{file}\.json"):
        write_report([run], tmp_path / REPORT_FILE)


# The final weights of the runs of `compare`.


def changed(name, index, value):
    array = STATE[name].copy()
    array.flat[index] = value
    return {**STATE, name: array}


OTHER = changed("model/conv/kernel", 5, 5.5)


def compare(**runs):
    """Compares runs, each given by its state and what differs in its metadata."""
    trained = {
        name: Checkpoint(dataclasses.replace(RUN_METADATA, **changes), make_history(4), state)
        for name, (state, changes) in runs.items()
    }
    return compare_weights(trained)


def test_the_largest_difference_is_named():
    def difference(first, second):
        (pair,) = compare(a=(first, {}), b=(second, {}))
        return pair["where"], pair["absolute"], pair["relative"]

    halves = {**OTHER, "model/conv/bias": np.full(3, 0.25, np.float32)}
    assert difference(STATE, halves) == ("conv/kernel", 0.5, pytest.approx(0.5 / 5.5))
    assert difference(STATE, STATE) == ("", 0.0, 0.0)
    name, absolute, _ = difference(STATE, changed("model/conv/kernel", 0, np.nan))
    assert name == "conv/kernel" and np.isnan(absolute)
    zeros = np.zeros(3, np.float32)
    zero, minus = ({**STATE, "model/conv/bias": value} for value in (zeros, -zeros))
    assert difference(zero, minus) == ("conv/bias", 0.0, 0.0)


ONE = {"num_replicas": 1, "num_shards": 1}
MOVING, SEEDS = {"model/norm/moving_mean": np.zeros(2)}, {"model/seed_generator": np.zeros(2)}


@pytest.mark.parametrize(
    ("first", "second", "outcome", "why"),
    [
        ((STATE, {}), (STATE, {}), "bit-identical", ""),
        ((STATE, {}), (OTHER, {}), "different", "should be identical"),
        ((STATE, ONE), (OTHER, {}), "different, as expected", "the summation order differs"),
        ((STATE, {}), (OTHER, {"all_reduce": "nccl"}), "different, as expected", "order differs"),
        ((STATE | MOVING, ONE), (OTHER | MOVING, {}), "different, as expected", "own statistics"),
        ((STATE | SEEDS, ONE), (OTHER | SEEDS, {}), "different, as expected", "random layers"),
    ],
)
def test_a_reason_to_differ_is_named(first, second, outcome, why):
    pairs = compare(a=first, b=second)
    assert pairs[0]["outcome"] == outcome and why in pairs[0]["why"]
    assert pairs_verdict(pairs)[0] == ("bad" if outcome == "different" else "good")


def test_runs_on_different_images_are_not_compared():
    other = {"dataset_sha256": "2", "dataset": "fashion_mnist"}
    with pytest.raises(DataError, match="a on synthetic, b on fashion_mnist"):
        compare(a=(STATE, {}), b=(STATE, other))


def test_the_table_shows_speed_up_over_single_on_real_devices():
    single, manual = (
        make_summary(make_history(4), {"strategy": name}) for name in ("single", "manual")
    )
    single["epoch_sec"], manual["epoch_sec"] = 10.0, 8.0
    _, rows = results_table({"single": single, "manual": manual})
    assert rows[1] == ["manual", "2 simulated", "0.7500", "8.00", "400"]
    for summary in (single, manual):
        summary["simulated_devices"] = False
    _, rows = results_table({"single": single, "manual": manual})
    assert [row[-1] for row in rows] == ["1.00x", "1.25x"]


# The page of verdicts: `python -m lockstep … --html FILE`.


def test_the_page_of_verdicts_is_replaced_and_no_other_file(tmp_path, capsys):
    one = Script()
    one.write(tmp_path / "one.npz")
    Script(replicas=2, replay=one).write(tmp_path / "two.npz")
    Script(replicas=2, replay=one, reduce=None).write(tmp_path / "wrong.npz")
    names = [str(tmp_path / f"{name}.npz") for name in ("one", "two", "wrong")]
    for _ in range(2):
        capsys.readouterr()
        assert main([*names, f"--html={tmp_path}/page.html"]) == 9
    right, wrong = capsys.readouterr().out.split("\n\n")
    page = Page((tmp_path / "page.html").read_text("utf-8"))
    assert page.paragraphs("good") == [right]
    assert page.paragraphs("bad") == wrong.splitlines()[:1] and "in step 0 (sum)" in wrong
    (tmp_path / "link.html").symlink_to("page.html")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("one.npz", "link.html", "", "none/page.html"):
        capsys.readouterr()
        with pytest.raises(SystemExit, match=r"^2$"):
            main([*names, f"--html={tmp_path / name}"])
        assert capsys.readouterr().err.count("\n") == 1
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
