"""Tests `report.html`: its numbers, that it is self-contained, and its errors."""

import dataclasses
import html
import html.parser
import itertools
import json
import os
import random
import re
import shutil
import subprocess
import sys

import pytest

import report_samples
from app.records.caveats import DATASET_CAVEATS, TIMING_CAVEAT
from app.records.files import read_json
from app.records.history import load_history, load_summary
from app.report.page import REPORT_FILE, write_report
from app.runtime.errors import OutputError
from conftest import ROOT
from in_process import run_here, run_here_ok

VOID = {"meta", "link", "br", "hr", "img", "input"}
AGAIN = (
    "Each step compared with one device that starts from the same state: bitwise identical in"
    " float32, or equal to float64 within rounding"
)
HOSTILE = "<script>alert(1)<b>\"&'{{ 7 * 7 }} $\\frac$"


class Page(html.parser.HTMLParser):
    """A page taken apart; raises where a tag is not closed as it was opened."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements, self.tables, self.headings = [], [], {}, []
        self.banners, self.text = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [name for name, _ in self.open]))
        if tag not in VOID:
            self.open.append((tag, dict(attrs)))
        if tag == "tr":
            self.row = []
        elif tag in ("td", "th"):
            self.row.append("")

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs), [name for name, _ in self.open]))

    def handle_endtag(self, tag):
        assert self.open and self.open[-1][0] == tag, (tag, self.open)
        self.open.pop()
        if tag == "tr":
            self.tables[self.caption].append(self.row)

    def handle_data(self, data):
        names = [name for name, _ in self.open]
        if "style" in names or not data.strip():
            return
        self.text.append(data)
        if names[-1] == "caption":
            self.caption = data
            self.tables[data] = []
        elif re.fullmatch(r"h\d", names[-1]):
            self.headings.append((int(names[-1][1]), data))
        elif "td" in names or "th" in names:
            self.row[-1] += data
        elif self.open[0][0] == "html" and any(a.get("class") == "banner" for _, a in self.open):
            self.banners.append(data)

    def named(self, tag):
        return [attrs for name, attrs, _ in self.elements if name == tag]

    def rows(self, caption):
        """Returns row name → column name → text."""
        header, *rows = self.tables[caption]
        return {row[0]: dict(zip(header, row, strict=True)) for row in rows}


def report(*directories, out=None):
    path = out or directories[0] / REPORT_FILE
    write_report(directories, path)
    return Page(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    report_samples.write_everything(folder)
    write_report([folder], folder / REPORT_FILE)
    return folder


@pytest.fixture
def page(everything):
    return Page((everything / REPORT_FILE).read_text(encoding="utf-8"))


def test_the_table_has_the_numbers_of_the_records(everything, page):
    rows = page.rows("Every training with its result")
    names = ["compared/single", "compared/manual", "compared/mirrored", "generated", "faulty"]
    assert sorted(rows) == sorted([*names, "begun", "stopped"])
    for name in names:
        summary, row = load_summary(everything / name), rows[name]
        assert row["strategy"] == summary.strategy
        assert row["model"] == summary.model and row["recipe"] == summary.recipe
        assert row["epochs"] == f"{len(load_history(everything / name))} of {summary.epochs}"
        assert row["test accuracy"] == f"{summary.test_accuracy:.4f}"
        assert row["best"] == f"{summary.best_test_accuracy:.4f}"
        assert row["sec/epoch"] == f"{summary.epoch_sec:.2f}"
        assert row["images/s"] == f"{summary.images_per_sec:,.0f}"
        assert summary.weights_sha256.startswith(row["weights"]) and len(row["weights"]) == 8
    assert rows["compared/manual"]["devices"] == "2 GPUs"
    assert rows["generated"]["devices"] == "2 simulated CPUs"
    assert [rows[n]["status"] for n in ("generated", "faulty", "begun", "stopped")] == [
        "finished", "injected fault", "no epoch finished", "mismatch",
    ]  # fmt: skip
    assert "It ended at a verified step: manual has a mismatch: lost gradient, step 1." in page.text


def test_the_curves_have_the_numbers_of_the_history(everything, page):
    rows = [row for row in page.tables["Accuracy and loss after each epoch"] if row[0] == "faulty"]
    (record,) = load_history(everything / "faulty")
    fields = ("test_accuracy", "train_accuracy", "test_loss", "train_loss")
    assert rows == [["faulty", "1", *(f"{getattr(record, field):.4f}" for field in fields)]]
    looks = {(a["class"], a["stroke-width"]) for a in page.named("polyline")}
    assert len(looks) >= 5  # In the legend: that many runs have a curve.
    assert "begun: no epoch is finished, so there is nothing to draw yet." in page.text


def curves_of(text, title, index=0):
    """Returns the points of the curves of a colour in a chart, in the SVG's coordinates."""
    chart = text.split(f">{title}</title>")[1].split("</svg>")[0]
    drawn = re.findall(
        rf'<path d="([^"]*)" style="fill: none; [^"]*stroke: var\(--c{index}\)', chart
    )
    return [
        [tuple(map(float, point)) for point in re.findall(r"[ML] (\S+) (\S+)", path)]
        for path in drawn
    ]


def test_a_curve_is_drawn_at_its_numbers(everything):
    text = (everything / REPORT_FILE).read_text(encoding="utf-8")
    history = load_history(everything / "compared" / "single")
    for field in ("test_accuracy", "train_accuracy", "test_loss", "train_loss"):
        (points,) = curves_of(text, field.replace("_", " "))
        xs, ys = zip(*points, strict=True)
        values = [getattr(record, field) for record in history]
        assert len(xs) == len(values) == 4
        assert [b - a for a, b in itertools.pairwise(xs)] == pytest.approx([xs[1] - xs[0]] * 3)
        scale = (ys[-1] - ys[0]) / (values[-1] - values[0])
        assert scale < 0  # Up is less in SVG.
        assert ys == pytest.approx([ys[0] + scale * (v - values[0]) for v in values], abs=1e-3)


def test_what_is_allowed_is_an_axis_of_powers(everything):
    text = (everything / REPORT_FILE).read_text(encoding="utf-8")
    (above,) = curves_of(text, "manual", 1)[-1:]
    assert len(above) == 2  # Two steps; the first is out of what is allowed.
    chart = text.rsplit(">manual</title>", 1)[1].split("</svg>")[0]
    assert "10⁸" in chart and "↓ allowed" in chart and "opacity: 0.14" in chart


def test_bars_have_their_lengths_and_texts(everything):
    text = (everything / REPORT_FILE).read_text(encoding="utf-8")
    chart = text.split(">images a second</title>")[2].split("</svg>")[0]
    bars = re.findall(r'<path d="M (\S+) \S+ \nL (\S+) [^"]*"\s+style="fill: var\(--c0\)', chart)
    lengths = [float(right) - float(left) for left, right in bars]
    rates = json.loads((everything / "measured" / "benchmark.json").read_text())["cases"]
    values = [case["images_per_sec"]["value"] for case in rates]
    assert lengths[1] / lengths[0] == pytest.approx(values[1] / values[0], rel=1e-4)
    for case, value in zip(rates, values, strict=True):
        assert f">{case['short_name']}</text>" in chart and f">{value:,.0f}</text>" in chart


def test_the_same_records_give_the_same_page(everything, tmp_path):
    made = re.compile("<p>Made .*</p>")
    texts = []
    for name in "ab":
        write_report([everything], tmp_path / name)
        texts.append(made.sub("", (tmp_path / name).read_text(encoding="utf-8")))
    assert texts[0] == texts[1]


def test_weights_verdicts_and_what_sets_a_pair_apart(page):
    pairs = page.rows("compared: final weights of each pair")
    assert pairs["single – manual"]["weights"] == "different, as expected"
    assert pairs["single – manual"]["apart by"] == "0.25"
    assert pairs["manual – mirrored"]["weights"] == "bit-identical"
    assert "single – manual: So." in page.text and "Not so." not in " ".join(page.text)
    same = page.rows("Trainings with bitwise identical weights")
    assert list(same) == ["compared/manual, compared/mirrored"]


def test_a_verification_with_its_first_mismatch(page):
    outcomes = page.rows(AGAIN)  # The last one: that with a fault.
    assert outcomes["mirrored"]["each step"] == "bit-identical"
    row = outcomes["manual"]
    assert (row["each step"], row["first mismatch"]) == ("different", "1")
    assert (row["what"], row["tensor"], row["replica"]) == ("sums", "conv1/kernel", "1")
    assert (row["by"], row["cause"]) == ("0.125", "lost gradient")
    assert any("the sum is without replica 1" in text for text in page.text)
    pairs = page.rows("Pairs of strategies after the last step")
    assert pairs["manual – mirrored"]["verdict"] == "different"
    assert pairs["manual – mirrored"]["apart by"] == "6e-09"
    shares = page.rows(
        "manual: error relative to what is allowed, the largest of all tensors and replicas"
    )
    assert shares["1"]["gradients after the all-reduce"] == "5e+07"
    assert shares["2"]["gradients after the all-reduce"] == "0.25"


def test_speed_of_runs_cases_and_parts(everything, page):
    rates = page.rows("Throughput of each case")
    record = json.loads((everything / "measured" / "benchmark.json").read_text())
    for case in record["cases"]:
        row = rates[case["short_name"]]
        assert row["images/s"] == f"{case['images_per_sec']['value']:,.0f}"
    (scaling,) = page.rows("Speed-up: strong scaling").values()
    assert (scaling["speed-up"], scaling["ideal"]) == ("1.500", "2")
    assert (scaling["efficiency"], scaling["verdict"]) == ("75%", "faster")
    parts = page.rows("Where the time of a step goes")
    assert parts["all-reduce"] == {
        "part": "all-reduce", "ms": "1.00", "95 % interval": "0.50 to 2.00", "share": "25.0%",
    }  # fmt: skip
    predicted = page.rows("Images a second with more devices")
    assert predicted["2"]["error of step time"] == "+2.5%"
    assert predicted["4"]["measured"] == "not measured"


def test_settings_that_differ_are_marked_and_changes_told(everything):
    page = report(everything / "generated", everything / "compared", out=everything / "two.html")
    rows = page.rows(
        "Settings in which trainings differ; marked where they are not as in the first"
    )
    assert rows["generated"]["dataset"] == "synthetic"
    assert rows["compared/single"]["dataset"] == "fashion_mnist"
    marked = [attrs for name, attrs, above in page.elements if name == "mark" and "td" in above]
    assert marked
    assert "recipe" not in rows["generated"] and page.rows("Settings")["recipe"]["value"] == "d2l"
    assert "generated: recipe d2l → fast" in page.text
    environment = page.rows("The same in all")
    assert environment["tensorflow"]["value"] == "2.21"


def test_what_must_not_be_missed_comes_first(page):
    told = dict(zip(page.banners[::2], page.banners[1::2], strict=True))
    assert (
        "faulty" in told["injected fault: drop_gradient:replica=1; the result is wrong on purpose"]
    )
    assert "generated" in told[DATASET_CAVEATS["synthetic"]]
    assert "generated" in told[TIMING_CAVEAT] and "compared" not in told[TIMING_CAVEAT]
    assert page.text.index(TIMING_CAVEAT) < page.text.index("Every training with its result")


def test_an_honest_run_on_real_devices_has_no_banner(tmp_path):
    report_samples.write_training(tmp_path / "run")
    page = report(tmp_path / "run")
    assert page.banners == []
    assert page.headings[0] == (1, "Lockstep report: run")


def test_the_page_is_whole_accessible_and_asks_for_nothing(everything, page):
    text = (everything / REPORT_FILE).read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>")
    assert page.named("html")[0]["lang"] == "en"
    assert "script" not in {name for name, *_ in page.elements}
    policy = next(a["content"] for a in page.named("meta") if "http-equiv" in a)
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert not any("src" in attrs or "srcset" in attrs for _, attrs, _ in page.elements)
    ids = [attrs["id"] for _, attrs, _ in page.elements if "id" in attrs]
    assert len(ids) == len(set(ids))
    for _, attrs, _ in page.elements:
        assert not any(name.startswith("on") for name in attrs)
        target = attrs.get("href", "data:,")
        assert target == "data:," or target.removeprefix("#") in ids
        assert attrs.get("xlink:href", f"#{ids[0]}").removeprefix("#") in ids
        assert set(attrs.get("aria-labelledby", "").split()) <= set(ids)
    assert not re.search(r"url\(|@import", text)
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b <= a + 1 for a, b in itertools.pairwise(levels))
    pictures = [attrs for attrs in page.named("svg") if attrs.get("aria-hidden") != "true"]
    assert len(pictures) >= 10
    assert all(attrs["role"] == "img" and attrs["aria-labelledby"] for attrs in pictures)
    assert len(page.named("desc")) == len(pictures)
    for attrs in page.named("th"):
        assert attrs["scope"] in ("row", "col")
    assert len(page.named("table")) == len(page.named("caption"))
    details = [above for name, _, above in page.elements if name == "details" and "figure" in above]
    assert len(details) == len(page.named("figure"))


def test_hostile_names_are_text(tmp_path):
    folder = tmp_path / HOSTILE
    report_samples.write_training(folder, model=HOSTILE, versions={HOSTILE: HOSTILE})
    report_samples.write_training(tmp_path / "other", changes=[HOSTILE], strategy=HOSTILE)
    page = report(tmp_path)
    assert "script" not in {name for name, *_ in page.elements}
    assert not any(name == "b" for name, *_ in page.elements)
    row = page.rows("Every training with its result")[HOSTILE]
    assert row["model"] == HOSTILE


def test_a_name_that_is_no_text_is_shown_all_the_same(tmp_path):
    folder = tmp_path / os.fsdecode(b"run \xff")
    report_samples.write_training(folder)
    assert list(report(folder).rows("Every training with its result")) == ["run ?"]


def test_weights_that_diverged_are_told_and_left_out_of_the_figures(tmp_path):
    report_samples.write_training(tmp_path / "a", test_loss=float("nan"), test_accuracy=0.1)
    path = tmp_path / "a" / "history.jsonl"
    history = [dataclasses.asdict(record) for record in load_history(tmp_path / "a")]
    history[-1]["train_loss"] = float("inf")
    path.write_text("".join(json.dumps(record) + "\n" for record in history))
    page = report(tmp_path / "a")
    assert page.tables["Accuracy and loss after each epoch"][-1][-1] == "inf"
    paths = [a["d"] for a in page.named("path")]
    assert paths and not any("inf" in each or "nan" in each for each in paths)
    text = (tmp_path / "a" / REPORT_FILE).read_text(encoding="utf-8")
    assert [len(curve) for curve in curves_of(text, "train loss")] == [3]


class TestPlaces:
    def test_beside_the_one_directory_and_again(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        report_samples.write_training(tmp_path / "run")
        for _ in range(2):
            result = run_here_ok("report", tmp_path / "run")
            assert result.stdout == f"saved {tmp_path}/run/report.html\n"
        assert [path.name for path in tmp_path.iterdir()] == ["run"]

    def test_several_from_elsewhere_without_tensorflow(self, tmp_path):
        for name in ("a", "b"):
            report_samples.write_training(tmp_path / name)
        code = (
            "import sys; from app.config import Config; from app.commands.report import run;"
            "run(Config.of('report', directories=tuple(sys.argv[1:])));"
            "assert not {'tensorflow', 'keras', 'matplotlib.pyplot'} & set(sys.modules)"
        )
        (tmp_path / "here").mkdir()
        arguments = [sys.executable, "-c", code, tmp_path / "a", tmp_path / "b"]
        # Whatever matplotlib is to use elsewhere: nothing is shown in a window.
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "MPLBACKEND": "nonsense"}
        subprocess.run(arguments, cwd=tmp_path / "here", env=environment, check=True)
        page = Page((tmp_path / "here" / REPORT_FILE).read_text(encoding="utf-8"))
        assert list(page.rows("Every training with its result")) == ["a", "b"]

    def test_a_run_counts_once_and_an_earlier_report_is_no_run(self, tmp_path):
        report_samples.write_comparison(tmp_path / "c")
        report(tmp_path)
        page = report(
            *sorted(tmp_path.iterdir()), tmp_path / "c" / "manual", out=tmp_path / "new" / "r.html"
        )
        rows = page.rows("Every training with its result")
        assert list(rows) == ["c/single", "c/manual", "c/mirrored"]

    def test_what_an_older_comparison_left_is_not_of_this_one(self, tmp_path):
        report_samples.write_comparison(tmp_path / "c")
        report_samples.write_training(tmp_path / "c" / "multi_worker")
        assert "c/multi_worker" not in report(tmp_path / "c").rows("Every training with its result")


class TestRefusals:
    @pytest.mark.parametrize("content", ["", "my own page", "<html>"])
    def test_what_is_no_report_of_ours_is_kept(self, tmp_path, content):
        report_samples.write_training(tmp_path / "run")
        path = tmp_path / "run" / REPORT_FILE
        path.write_text(content)
        result = run_here("report", tmp_path / "run")
        assert result.returncode == 5
        (line,) = result.stderr.splitlines()
        assert re.match(r"error: .*report\.html exists and is no report .*; .*--out", line)
        assert path.read_text() == content

    def test_a_link_is_not_followed(self, tmp_path):
        report_samples.write_training(tmp_path / "run")
        page = report(tmp_path / "run", out=tmp_path / "real.html")
        (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
        assert page.headings
        with pytest.raises(OutputError, match=r"link\.html exists and is no report"):
            write_report([tmp_path / "run"], tmp_path / "link.html")

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("nowhere", "does not exist"),
            ("file", "not a directory"),
            ("empty", "not the directory of a run"),
        ],
    )
    def test_what_is_no_run(self, tmp_path, name, message):
        (tmp_path / "file").write_text("x")
        (tmp_path / "empty").mkdir()
        with pytest.raises(OutputError, match=message):
            write_report([tmp_path / name], tmp_path / REPORT_FILE)
        assert not (tmp_path / REPORT_FILE).exists()

    @pytest.mark.parametrize(
        "name",
        [
            *("generated/summary.json", "generated/history.jsonl", "compared/compare.json"),
            *("compared/manual/config.json", "proved/verify.json", "measured/benchmark.json"),
            "case/verify.json",
            "explained/explain.json",
        ],
    )
    def test_a_record_cut_off_is_named(self, everything, tmp_path, name):
        shutil.copytree(everything, tmp_path / "runs", symlinks=True)
        path = tmp_path / "runs" / name
        path.write_bytes(path.read_bytes()[:-10])
        out = tmp_path / REPORT_FILE
        with pytest.raises(OutputError, match=re.escape(path.name)) as refusal:
            write_report([tmp_path / "runs"], out)
        assert "\n" not in str(refusal.value)
        assert not out.exists()


def leaves(value, path=()):
    """Yields where every value of a record is; of long lists the first two."""
    if path:
        yield path
    keys = range(min(2, len(value))) if isinstance(value, list) else ()
    for key in value if isinstance(value, dict) else keys:
        yield from leaves(value[key], (*path, key))


@pytest.mark.parametrize("num_tries", [60, pytest.param(120, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("proved", "verify"), ("refuted", "verify"), ("case", "verify"), ("measured", "benchmark"),
        ("explained", "explain"), ("compared", "compare"), ("generated", "summary"),
    ],
)  # fmt: skip
def test_whatever_a_record_holds_it_is_shown_or_refused(
    everything, tmp_path, name, kind, num_tries
):
    run = tmp_path / "run"
    shutil.copytree(everything / name, run)
    path = run / f"{kind}.json"
    record, out = read_json(path), tmp_path / REPORT_FILE
    tried = list(itertools.product(leaves(record), (None, "x", -1.5, [], {"a": 1})))
    refused = shown = 0
    for where, other in random.Random(0).sample(tried, min(len(tried), num_tries)):
        damaged = at = json.loads(json.dumps(record))
        for key in where[:-1]:
            at = at[key]
        at[where[-1]] = other
        path.write_text(json.dumps(damaged))
        try:
            write_report([run], out)
            shown += 1
        except OutputError:
            refused += 1
    assert refused and shown


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
in_a_browser = pytest.mark.skipif(not CHROMIUM, reason="no chromium is installed")


def browse(path, folder):
    """Opens a file in a browser without a window; returns its DOM, and what the browser said."""
    result = subprocess.run(
        [
            CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--disable-background-networking", "--hide-scrollbars", "--enable-logging=stderr",
            f"--user-data-dir={folder / 'profile'}", f"--log-net-log={folder / 'net.json'}",
            "--net-log-capture-mode=Everything", "--dump-dom", path.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    return result.stdout, result.stderr


def requests(folder):
    """Returns what was fetched over the network, but for what the browser wants for itself."""
    log = (folder / "net.json").read_text(encoding="utf-8")
    own = re.compile(r"https?://[^/]*\b(google|gvt1|googleapis)\.com/")
    return {url for url in re.findall(r'"url":"(\w+://[^"]+)"', log) if not own.match(url)}


@in_a_browser
class TestBrowser:
    def test_it_shows_the_numbers_without_a_complaint_or_a_request(self, everything, tmp_path):
        dom, said = browse(everything / REPORT_FILE, tmp_path)
        assert "CONSOLE" not in said
        summary = load_summary(everything / "generated")
        row = Page(dom).rows("Every training with its result")["generated"]
        assert row["test accuracy"] == f"{summary.test_accuracy:.4f}"
        assert requests(tmp_path) == set()

    def test_a_complaint_and_a_request_would_be_seen(self, everything, tmp_path):
        """What the test above rests on, with a picture from elsewhere in the page."""
        address = "http://127.0.0.1:9/x.png"
        text = (everything / REPORT_FILE).read_text(encoding="utf-8")
        text = text.replace("<main>", f'<main><img src="{address}">')
        page = tmp_path / "page.html"
        page.write_text(text, encoding="utf-8")
        _, said = browse(page, tmp_path)
        assert "CONSOLE" in said and "Content Security Policy" in said
        assert requests(tmp_path) == set()
        page.write_text(text.replace("Content-Security-Policy", "x"), encoding="utf-8")
        browse(page, tmp_path)
        assert requests(tmp_path) == {address}

    @pytest.mark.parametrize("width", [360, 768, 1280])
    def test_no_sideways_scroll(self, everything, tmp_path, width):
        text = (
            (everything / REPORT_FILE)
            .read_text(encoding="utf-8")
            .replace("<details", "<details open")
        )
        assert self.scroll_width(text, tmp_path, width) == width
        wide = text.replace("<main>", '<main><div style="width: 2000px">')
        assert self.scroll_width(wide, tmp_path, width) > width

    @staticmethod
    def scroll_width(text, folder, width):
        """Returns how wide a page is in a frame of `width` pixels."""
        frame = folder / "frame.html"
        frame.write_text(
            f'<!DOCTYPE html><iframe style="width:{width}px;height:600px;border:0"'
            f' srcdoc="{html.escape(text)}"></iframe><script>onload = () => {{'
            "document.title = 'width ' + document.querySelector('iframe')"
            ".contentDocument.documentElement.scrollWidth}</script>",
            encoding="utf-8",
        )
        dom, _ = browse(frame, folder)
        return int(re.search(r"<title>width (\d+)</title>", dom)[1])
