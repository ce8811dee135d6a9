"""`benchmark` from the command line, and what it draws."""

import dataclasses
import json
import re

import matplotlib
import numpy as np
import pytest

from app.options import Config, names
from app.performance import interval
from app.performance.benchmark_output import create_cases, plot_benchmark, write_benchmark
from app.performance.breakdown import break_down, cases_without
from app.performance.case import split_names
from app.performance.case_comparison import all_comparisons, compare
from app.runtime.errors import ConfigError
from tests.cli.report_samples import make_sample
from tests.conftest import run_ok
from tests.in_process import run_here, run_here_ok


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
    several = [p.config for p in cases if p.config.num_devices_of_all_workers == 2]
    assert {each.distribution.all_reduce for each in several} == {"ring"}
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
    assert re.search(r"manual × 2.* / single × 1", drawn) and "strong scaling" in drawn
    assert "recipe d2l" in drawn and ">mixed_bfloat16<" in drawn  # The legend.
    assert (tmp_path / "benchmark.png").exists()


@pytest.mark.slow
def test_a_benchmark_measures_every_case_in_every_round(small_data, tmp_path):
    out = tmp_path / "bench"
    result = run_ok(
        "benchmark", "--strategies=single,manual", "--num_devices=2", "--repeats=5",
        "--global_batch_size=50", f"--out={out}", f"--data_dir={small_data}",
        "--allow_unverified_data",
    )  # fmt: skip
    record = json.loads((out / "benchmark.json").read_text())
    assert [p["strategy"] for p in record["cases"]] == ["single", "manual"]
    for case in record["cases"]:
        assert len(case["blocks"]) == 5
        assert case["peak_memory_bytes"] > 1 << 27
    assert [c["axis"] for c in record["comparisons"]] == ["strong scaling"]
    assert record["comparisons"][0]["verdict"] != "refused"
    assert "timing is not scaling" in result.stderr


def test_a_breakdown_leaves_one_part_out_at_a_time(small_data, small_lenet, tmp_path, monkeypatch):
    monkeypatch.setattr(names, "MIN_ROUNDS", 2)
    out = tmp_path / "bench"
    result = run_here_ok(
        "benchmark", "--breakdown", "--strategies=manual", "--num_devices=2",
        "--repeats=2", "--global_batch_size=50", f"--out={out}", f"--data_dir={small_data}",
        "--allow_unverified_data",
    )  # fmt: skip
    record = json.loads((out / "benchmark.json").read_text())
    (manual,) = record["breakdowns"]
    for case in record["cases"]:
        assert len(case["blocks"]) == 2
        assert all(block["sec"] > 0 and block["tracings"] == 0 for block in case["blocks"])
    assert {path.name for path in out.iterdir()} >= {"benchmark.png", "benchmark.svg", "log.txt"}
    assert run_here("train", f"--out={out}", "--num_devices=2").returncode == 4
    parts = ["compute", "all-reduce", "input", "everything else"]
    assert [part["name"] for part in manual["parts"]] == parts
    assert sum(part["share"]["value"] for part in manual["parts"]) == pytest.approx(1)
    assert [link[:2] for link in manual["traffic"]["links"]] == [[0, 1], [1, 0]]
    assert "bytes between devices in a step of manual × 2" in result.stdout
    assert "where a step of manual × 2" in (out / "report.html").read_text(encoding="utf-8")


def test_parts_are_differences_of_medians():
    config = Config.of(
        "benchmark", breakdown=True, strategies=("manual", "sharded"), num_devices=(2,)
    )
    case, sharded = create_cases(config)
    assert list(cases_without(sharded, config)) == ["compute", "input"]
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


# --- Comparisons


def fast(*step_secs, **facts):
    return make_sample("mirrored", step_secs=step_secs or (0.5, 0.55, 0.45, 0.52, 0.48), **facts)


BASE = make_sample(step_secs=(1.0, 1.1, 0.9, 1.05, 0.95))


@pytest.mark.parametrize(
    ("sample", "base", "verdict", "caveat"),
    [
        (fast(jit_compile=True), BASE, "refused", "XLA on one side only"),
        (fast(tracings=1), BASE, "refused", "traced 5 times while it was timed"),
        (fast(dataset="synthetic"), BASE, "refused", "other images"),
        (fast(num_devices=2, all_reduce="nccl"), make_sample(num_devices=2), "faster",
         "another all-reduce: reduce_to_one and nccl"),
        (fast(), make_sample(all_reduce="none"), "faster", None),  # One device has none.
        (fast(), BASE, "faster", None), (BASE, fast(), "slower", None),
        (fast(1.01, 1.0, 0.98, 1.06, 0.94), BASE, "no difference found", None),
    ],
)  # fmt: skip
def test_unfair_comparisons_are_refused_or_marked_and_fair_ones_are_not(
    sample, base, verdict, caveat
):
    found = compare("strategy", sample, base)
    assert found.verdict == verdict and len(found.caveats) == (caveat is not None)
    if caveat:
        assert caveat in found.caveats[0]
        assert found.caveats[0].startswith("refused: ") == (verdict == "refused")
    assert (found.speed_up is None) == (verdict == "refused")


def test_shared_processors_and_rounded_float32_are_marked():
    simulated = compare("strong scaling", make_sample(num_devices=2, simulated=True), BASE)
    assert "2 share 2 cores" in simulated.caveats[0] and simulated.speed_up is not None
    rounded = fast(precision="mixed_bfloat16", tensor_float_32=True)
    tf32 = compare("precision", rounded, make_sample(tensor_float_32=True))
    assert tf32.caveats == ["float32 products are rounded to TF32"]
    assert tf32.speed_up.value == pytest.approx(2.0)


def test_every_comparison_that_the_cases_allow_is_made_once():
    cases = [
        make_sample("single"),
        make_sample("manual", 1),
        make_sample("manual", 2),
        make_sample("manual", 4),
        make_sample("manual", 2, global_batch_size=512),
        make_sample("mirrored", 2),
        make_sample("mirrored", 2, precision="mixed_bfloat16"),
    ]
    found = [(c.axis, c.case[:12], c.base[:12], c.ideal) for c in all_comparisons(cases)]
    assert found == [
        ("strong scaling", "manual × 2, ", "single × 1, ", 2),
        ("strong scaling", "manual × 4, ", "single × 1, ", 4),
        ("strong scaling", "mirrored × 2", "single × 1, ", 2),
        ("weak scaling", "manual × 2, ", "single × 1, ", 2),
        ("strategy", "manual × 1, ", "single × 1, ", None),
        ("strategy", "mirrored × 2", "manual × 2, ", None),
        ("precision", "mirrored × 2", "mirrored × 2", None),
    ]


# --- Medians, ratios and their intervals ---------------------------------------------------------


def test_medians_and_paired_ratios_ignore_outliers_and_noise_that_hits_both():
    found = interval.median([1.0, 1.1, 0.9, 1.0, 50.0, 1.05, 0.95])
    assert found.value == 1.0
    assert found.low <= 1.0 <= found.high < 50
    slow_down = np.random.default_rng(0).uniform(1, 3, 41)
    paired = interval.ratio(1.02 * slow_down, slow_down)
    assert paired.value == pytest.approx(1.02)
    assert paired.high - paired.low < 1e-9  # Without pairing by round they would be far apart.
    with pytest.raises(ValueError, match="rounds"):
        interval.ratio([1.0, 2.0], [1.0])


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
    generator = np.random.default_rng(0)
    covered = [
        interval.ratio(generator.normal(3, 0.3, 21), generator.normal(2, 0.2, 21)).contains(1.5)
        for _ in range(50)
    ]
    assert 0.88 < np.mean(covered) <= 1
    a, b = generator.normal(1, 0.1, 15), generator.normal(1, 0.1, 15)
    assert interval.ratio(a, b).contains(1.0) and not interval.ratio(2 * a, b).contains(1.0)
