"""`benchmark` from the command line, and what it draws."""

import dataclasses
import json
import re

import matplotlib
import pytest

from app.options import Config
from app.performance.benchmark_output import create_cases, plot_benchmark, write_benchmark
from app.performance.breakdown import break_down, cases_without
from app.performance.case import split_names
from app.performance.case_comparison import all_comparisons
from app.runtime.errors import ConfigError
from conftest import run_ok
from in_process import run_here, run_here_ok
from performance_samples import make_sample

# Of the layers' shapes: conv1 26·26·9·20, conv2 9·9·25·20·50, then 800·128 and 128·10; twice each
# for a multiplication and an addition, three passes, and no gradient of the images.


# How a command is run, and how large its model is: inside this process a dense layer.
in_each_way = pytest.mark.parametrize(
    ("run", "num_parameters"),
    [
        pytest.param(run_here_ok, 7_850, marks=pytest.mark.e2e, id="here"),
        pytest.param(run_ok, 129_068, marks=pytest.mark.slow, id="processes"),
    ],
)


def test_cases_are_all_combinations_and_single_has_one_device():
    config = Config.of(
        "benchmark",
        num_devices=(1, 2),
        global_batch_size=(64, 128),
        strategies=("single", "manual"),
        all_reduce="ring",
    )
    cases = create_cases(config)
    assert len(cases) == 6 and len({p.name for p in cases}) == 6
    assert {
        p.config.distribution.all_reduce for p in cases if p.config.num_devices_of_all_workers == 2
    } == {"ring"}
    config = Config.of(
        "benchmark", strategies=("single", "manual", "pipeline"), num_devices=(2, 4),
        model_parallel=2, micro_batches=8,
    )  # fmt: skip
    cases = [
        (c.name.partition(",")[0], c.config.distribution.micro_batches)
        for c in create_cases(config)
    ]
    assert cases == [
        ("single × 1", 4), ("manual × 2", 4), ("manual × 4", 4),
        ("pipeline × 2", 8), ("pipeline × 4", 8),
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="number of replicas, 2, got 1"):
        create_cases(Config.of("benchmark", global_batch_size=(1,)))


def test_names_keep_what_distinguishes_cases():
    common, short = split_names(["a × 1, lenet, batch 8", "a × 2, lenet, batch 8, 1 core"])
    assert common == "lenet, batch 8"
    assert list(short.values()) == ["a × 1", "a × 2, 1 core"]


def test_the_record_and_the_figure_have_every_case(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    cases = [
        make_sample("single", 1, (1.0, 1.1, 0.9, 1.0, 1.0)),
        make_sample("manual", 2, (0.6, 0.5, 0.7, 0.6, 0.6)),
        make_sample("mirrored", 2, (0.6, 0.5, 0.7, 0.6, 0.6), precision="mixed_bfloat16"),
    ]
    write_benchmark(tmp_path, Config.of(), cases, all_comparisons(cases))
    record = json.loads((tmp_path / "benchmark.json").read_text())
    assert record["comparisons"][0]["verdict"] == "faster"
    plot_benchmark(tmp_path, cases, all_comparisons(cases))
    drawn = (tmp_path / "benchmark.svg").read_text()
    assert "images per second" in drawn and "speed-up" in drawn
    assert re.search(r"manual × 2.* / single × 1.*, strong scaling", drawn)
    assert (tmp_path / "benchmark.png").exists()


@in_each_way
def test_a_benchmark_measures_every_case_in_every_round(
    small_data, small_lenet, tmp_path, run, num_parameters
):
    out = tmp_path / "bench"
    result = run(
        "benchmark", "--strategies=single,manual", "--num_devices=2", "--repeats=2",
        "--global_batch_size=50", f"--out={out}", f"--data_dir={small_data}",
        "--allow_unverified_data",
    )  # fmt: skip
    record = json.loads((out / "benchmark.json").read_text())
    assert [p["strategy"] for p in record["cases"]] == ["single", "manual"]
    for case in record["cases"]:
        assert len(case["blocks"]) == 2
        assert all(block["sec"] > 0 and block["tracings"] == 0 for block in case["blocks"])
        assert case["peak_memory_bytes"] > 1 << 27
    assert [c["axis"] for c in record["comparisons"]] == ["strong scaling"]
    assert "fewer than 5 rounds" in result.stdout and "timing is not scaling" in result.stderr
    assert {path.name for path in out.iterdir()} >= {"benchmark.png", "benchmark.svg", "log.txt"}
    assert "images/s" in (out / "report.html").read_text(encoding="utf-8")
    refused = run_here("train", f"--out={out}", "--num_devices=2")
    assert refused.returncode == 4


@pytest.mark.e2e
def test_a_breakdown_leaves_one_part_out_at_a_time(small_data, small_lenet, tmp_path):
    out = tmp_path / "bench"
    result = run_here_ok(
        "benchmark", "--breakdown", "--strategies=single,manual,sharded", "--num_devices=2",
        "--repeats=2", "--global_batch_size=50", f"--out={out}", f"--data_dir={small_data}",
        "--allow_unverified_data",
    )  # fmt: skip
    manual, sharded = json.loads((out / "benchmark.json").read_text())["breakdowns"]
    names = ["compute", "all-reduce", "input", "everything else"]
    assert [part["name"] for part in manual["parts"]] == names
    assert [part["name"] for part in sharded["parts"]] == ["compute", "input", "everything else"]
    for breakdown in (manual, sharded):
        assert sum(part["share"]["value"] for part in breakdown["parts"]) == pytest.approx(1)
        by_formula = sum(size for *_, size in breakdown["traffic"]["terms"])
        assert by_formula == sum(size for *_, size in breakdown["traffic"]["links"]) > 0
    assert "equal; 2 connections, the busiest from device" in result.stdout
    assert "where a step of manual × 2" in (out / "report.html").read_text(encoding="utf-8")


def test_parts_are_differences_of_medians():
    config = Config.of("benchmark", breakdown=True, strategies=("manual",), num_devices=(2,))
    (case,) = create_cases(config)
    without = cases_without(case, config)
    assert list(without) == ["compute", "input", "all-reduce"]
    assert without["compute"].config.training.global_batch_size == 128
    samples = {
        "compute": dataclasses.replace(make_sample(step_secs=[4.0] * 5), case=without["compute"]),
        "input": make_sample(step_secs=[9.0] * 5),
        "all-reduce": make_sample(step_secs=[7.0] * 5),
    }
    parts = break_down(make_sample(num_devices=2, step_secs=[10.0] * 5), samples).parts
    found = {part.name: part.sec.value for part in parts}
    assert found == {"compute": 4.0, "all-reduce": 3.0, "input": 1.0, "everything else": 2.0}
    # Of devices that share two cores, each has one.
    shared = make_sample(num_devices=3, step_secs=[10.0] * 5, simulated=True)
    samples["compute"] = dataclasses.replace(
        samples["compute"], case=dataclasses.replace(without["compute"], cores=1)
    )
    assert break_down(shared, samples).parts[0].sec.value == pytest.approx(6.0)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["benchmark", "--breakdown", "--num_devices=1"], "needs a strategy on several devices"),
        (["benchmark", "--strategies=single", "--num_devices=4"], "runs on one device"),
        (["benchmark", "--num_devices=1,x"], "whole numbers between 1 and 64"),
        (["benchmark", "--num_devices=2,2"], "must name each value once, got 2,2"),
        (["benchmark", "--num_devices=0"], "between 1 and 64, separated by commas, got 0"),
        (["benchmark", "--precision=half"], "must be one of float32"),
        (["benchmark", "--model=vgg"], "must be one of lenet"),
        (["benchmark", "--repeats=1"], "between 2 and"),
        (["train", "--num_devices=1,2"], "between 1 and 64, got 1,2"),
        (["train", "--repeats=3"], "not an option of train, only of benchmark"),
        (["benchmark", "--epochs=3"], "not an option of benchmark, only of train"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments, said):
    result = run_here(*arguments)
    assert result.returncode == 2
    assert said in result.stderr.splitlines()[-1]
