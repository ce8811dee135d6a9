"""`benchmark` and `explain` from the command line, and what they draw."""

import json
import re

import matplotlib
import pytest

from app.config import Config
from app.performance.benchmark_output import create_cases, plot_benchmark, write_benchmark
from app.performance.case import split_names
from app.performance.speed_comparison import all_comparisons
from app.runtime.errors import ConfigError
from conftest import run_ok
from in_process import run_here, run_here_ok
from performance_samples import make_sample
from small_models import build_network
from strategies.flops import training_flops_per_example

# Of the layers' shapes: conv1 26·26·9·20, conv2 9·9·25·20·50, then 800·128 and 128·10; twice each
# for a multiplication and an addition, three passes, and no gradient of the images.
LENET_FLOPS = 2 * (2 * 121_680 + 3 * (2_025_000 + 102_400 + 1_280))


# How a command is run, and how large its model is: inside this process a dense layer.
in_each_way = pytest.mark.parametrize(
    ("run", "num_parameters"),
    [
        pytest.param(run_here_ok, 7_850, marks=pytest.mark.e2e, id="here"),
        pytest.param(run_ok, 129_068, marks=pytest.mark.slow, id="processes"),
    ],
)


def test_flops_of_lenet():
    assert training_flops_per_example(build_network("lenet")) == LENET_FLOPS


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
    assert {p.config.all_reduce for p in cases if p.config.num_devices_of_all_workers == 2} == {
        "ring"
    }
    config = Config.of(
        "benchmark", strategies=("single", "manual", "pipeline"), num_devices=(2, 4),
        model_parallel=2, micro_batches=8,
    )  # fmt: skip
    cases = [(c.name.partition(",")[0], c.config.micro_batches) for c in create_cases(config)]
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
    write_benchmark(tmp_path, Config.of(), cases, all_comparisons(cases), {"float32": [1e9] * 5})
    record = json.loads((tmp_path / "benchmark.json").read_text())
    assert record["cases"][0]["share_of_matrix_product_peak"]["value"] == pytest.approx(0.256)
    assert record["cases"][2]["share_of_matrix_product_peak"] is None
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
        assert 0 < case["share_of_matrix_product_peak"]["value"] < 1.5
        assert case["peak_memory_bytes"] > 1 << 27
        # This process holds memory for the steps before the first one.
        least = 1 << 20 if run == run_ok else -1
        assert least < case["memory_of_steps_bytes"] < case["peak_memory_bytes"]
    assert [c["axis"] for c in record["comparisons"]] == ["strong scaling"]
    assert "fewer than 5 rounds" in result.stdout and "simulated devices" in result.stdout
    assert {path.name for path in out.iterdir()} >= {"benchmark.png", "benchmark.svg", "log.txt"}
    assert "images/s" in (out / "report.html").read_text(encoding="utf-8")
    refused = run_here("train", f"--out={out}", "--num_devices=2")
    assert refused.returncode == 4


@in_each_way
def test_explain_profiles_a_step_and_breaks_down_its_time(
    small_data, small_lenet, tmp_path, run, num_parameters
):
    out = tmp_path / "explained"
    result = run(
        "explain", "--strategy=mirrored", "--num_devices=2", "--repeats=2",
        "--global_batch_size=50", f"--out={out}", f"--data_dir={small_data}",
        "--allow_unverified_data",
    )  # fmt: skip
    record = json.loads((out / "explain.json").read_text())
    assert record["step_profile"]["shards"] == [25, 25]
    assert record["step_profile"]["gradient_bytes"] == 4 * num_parameters
    assert [p["num_replicas"] for p in record["predictions"]] == [2, 4, 8]
    assert sum(p["share"]["value"] for p in record["parts"]) == pytest.approx(1)
    for said in ("25 + 25", "in the fit", "break-even", "bus GB/s", "simulated devices"):
        assert said in result.stdout


@pytest.mark.e2e
def test_explain_of_a_strategy_without_an_all_reduce_to_leave_out(
    small_data, small_lenet, tmp_path
):
    out = tmp_path / "explained"
    result = run_here_ok(
        "explain", "--strategy=sharded", "--num_devices=2", "--repeats=2", "--recipe=fast",
        "--global_batch_size=50", f"--out={out}", f"--data_dir={small_data}",
        "--allow_unverified_data",
    )  # fmt: skip
    record = json.loads((out / "explain.json").read_text())
    assert [part["name"] for part in record["parts"]] == ["compute", "input", "everything else"]
    traffic = record["split"]["traffic"]
    assert traffic["counted_bytes"] == traffic["formula_bytes"] > 0 and not traffic["note"]
    assert "equal on each of 2 connections" in result.stdout
    assert "Bytes between devices in a step" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["explain", "--num_devices=4,3,2"], "--num_devices must rise, got 4,3,2"),
        (["explain", "--global_batch_size=3"], "at least the number of replicas, 4"),
        (["explain", "--strategy=mirrored", "--all_reduce=hierarchical"], "its cost is not known"),
        (["benchmark", "--strategies=single", "--num_devices=4"], "runs on one device"),
        (["explain", "--strategy=single"], "--strategy must be one of manual, mirrored"),
        (["benchmark", "--num_devices=1,x"], "whole numbers separated by commas"),
        (["benchmark", "--num_devices=2,2"], "must name each value once, got 2,2"),
        (["benchmark", "--num_devices=0"], "between 1 and 64, got 0"),
        (["benchmark", "--precision=half"], "must be one of float32"),
        (["benchmark", "--model=vgg"], "must be one of lenet"),
        (["benchmark", "--repeats=1"], "between 2 and"),
        (["train", "--num_devices=1,2"], "must be a whole number, got '1,2'"),
        (["train", "--repeats=3"], "not an option of train, only of benchmark"),
        (["benchmark", "--epochs=3"], "not an option of benchmark, only of train"),
    ],
)
def test_what_cannot_be_measured_is_refused_at_once(arguments, said):
    result = run_here(*arguments)
    assert result.returncode == 2
    assert said in result.stderr.splitlines()[-1]
