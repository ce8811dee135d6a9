"""The comparison of runs, and `report.html`: verdicts, caveats, refusals.

The pages of each command are read where it runs: `test_commands`, `test_verify`.
"""

import dataclasses
import os
import re

import numpy as np
import pytest

from app.commands.compare import compare_weights
from app.errors import DataError
from app.records.checkpoint import Checkpoint
from app.records.files import write_json
from app.report import plots
from app.report.page import REPORT_FILE, pairs_verdict, results_table, write_report
from tests.cli.report_samples import Page, write_config, write_training
from tests.conftest import ROOT, assert_ok, run_python
from tests.training.test_checkpoint import RUN_METADATA, STATE, make_history

HOSTILE = "<script>alert(1)<b>\"&'{{ 7 * 7 }} $\\frac$"


def report(*directories, out=None):
    out = out or directories[0] / REPORT_FILE
    write_report(directories, out)
    return Page(out)


def test_a_page_asks_for_nothing_and_hostile_names_are_text(tmp_path):
    config = {"model": HOSTILE, "strategy": HOSTILE}
    write_training(tmp_path / HOSTILE, config=config, versions={HOSTILE: HOSTILE})
    write_training(tmp_path / os.fsdecode(b"run \xff"))
    write_config(tmp_path / "v", "verify")
    record = {"trainings": {}, "pairs": [], "facts": {HOSTILE: [HOSTILE]}}
    write_json(tmp_path / "v" / "verify.json", record)
    page = report(tmp_path)
    assert not {"script", "iframe", "object", "b"} & {*page.tags}
    assert page.row(HOSTILE) and page.row("run ?") and HOSTILE in page.text
    policy = page.root.find("head/meta[@http-equiv]").get("content")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; img-src data:")
    assert not re.search(r"url\(|@import|https?://", (tmp_path / REPORT_FILE).read_text("utf-8"))
    assert page.root.find(".//img").get("src").startswith("data:image/svg+xml;base64,")


def test_a_report_imports_no_tensorflow(tmp_path):
    write_training(tmp_path / "run")
    code = (
        "import sys; from app.options import Config; from app.commands.report import run;"
        "run(Config.of('report', directories=tuple(sys.argv[1:])));"
        "assert not {'tensorflow', 'keras', 'matplotlib.pyplot'} & set(sys.modules)"
    )
    environment = {"PYTHONPATH": str(ROOT), "MPLBACKEND": "nonsense"}
    assert_ok(run_python("-c", code, tmp_path / "run", cwd=tmp_path, env=environment))
    assert (tmp_path / "run" / REPORT_FILE).exists()


def test_which_records_a_page_is_made_of(tmp_path, monkeypatch):
    monkeypatch.setattr(plots, "render", lambda figure, suffix: b"<svg/>")
    names = "single", "manual", "mirrored"
    write_config(tmp_path / "c", "compare", strategies=list(names))
    write_json(tmp_path / "c" / "compare.json", {"pairs": []})
    write_training(tmp_path / "c" / "single", config={"strategy": "single"})
    write_training(tmp_path / "c" / "manual", num_epochs=3)
    write_config(tmp_path / "c" / "mirrored")
    write_training(tmp_path / "c" / "multi_worker")  # Of an older comparison.
    (tmp_path / "bert").mkdir()
    (tmp_path / "bert" / "config.json").write_text('{"of": "another program"}')
    (tmp_path / "broken").symlink_to("nowhere")
    page = report(tmp_path / "c")  # Its trainings stand once in its section.
    assert page.tags.count("section") == page.tags.count("img") == 1
    assert [row[0] for row in page.rows].count("manual") == 1
    assert "mirrored: no epoch is finished yet" in page.paragraphs()
    assert "manual: not finished, 3 of 4 epochs" in page.paragraphs()
    assert page.row("≠ strategy") and page.paragraphs("caveat") == []
    page = report(tmp_path, tmp_path / "c" / "manual", out=tmp_path / "all.html")
    assert page.paragraphs()[0].endswith(" from c, c/single, c/manual, c/mirrored.")
    (tmp_path / "c" / "compare.json").unlink()
    write_config(tmp_path / "c", "compare", strategies=["single"])
    assert "Not finished: there is no result yet." in report(tmp_path / "c").text
    names = ("manual", REPORT_FILE, "single")  # `runs/*` may hold an earlier report.
    page = report(*(tmp_path / "c" / name for name in names), out=tmp_path / "new" / "r.html")
    assert {"manual", "single"} <= {row[0] for row in page.rows}


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


def test_the_table_shows_speed_up_over_single_on_real_devices(tmp_path):
    runs = {
        name: write_training(tmp_path / name, config={"strategy": name})
        for name in ("single", "manual")
    }
    runs["single"]["epoch_sec"] = 10.0
    _, rows = results_table(runs)
    assert [row[-1] for row in rows] == ["1.00x", "4.00x"]
    runs["single"]["simulated_devices"] = True
    assert results_table(runs)[1][1] == ["manual", "2", "0.7500", "2.50", "400"]
