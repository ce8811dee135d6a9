"""`benchmark`: times strategies, device counts, batch sizes and precisions in turn."""

from app.config import BenchmarkConfig
from app.config.training_configs import training_config
from app.performance.benchmark_output import (
    BENCHMARK_FILE,
    create_cases,
    plot_benchmark,
    write_benchmark,
)
from app.performance.rounds import measure
from app.performance.speed_comparison import all_comparisons
from app.records.run_directory import RunDirectory, open_command_directory
from app.records.run_naming import default_out, named_path
from app.report.page import REPORT_FILE, write_report
from app.runtime import console
from app.runtime.progress_bar import StepProgress


def run(config: BenchmarkConfig) -> None:
    """Measures every case, prints tables and caveats, and saves them with a figure."""
    cases = create_cases(config)
    path = named_path(config.out or default_out("benchmark", *config.model))
    with open_command_directory(
        path, {**_fields(config), "command": "benchmark"}, overwrite=config.overwrite
    ) as run_directory:
        _benchmark(config, cases, run_directory)


def _benchmark(config: BenchmarkConfig, cases: list, run_directory: RunDirectory) -> None:
    console.say(
        f"{console.count(len(cases), 'case')} in {console.count(config.repeats, 'round')}, each"
        " case in a process of its own"
    )
    peaks = [
        training_config(cases[0].config, "single", precision=p)
        for p in config.precision
        if p != "mixed_float16"
    ]
    with StepProgress(1) as progress:
        measured = measure(cases, repeats=config.repeats, progress=progress, peaks=peaks)
    samples, limits = measured.samples, measured.peaks
    comparisons = all_comparisons(samples)
    run_directory.start(overwrite=config.overwrite)
    out_dir = run_directory.path
    write_benchmark(out_dir, config, samples, comparisons, limits).print()
    plot_benchmark(out_dir, samples, comparisons)
    files = [BENCHMARK_FILE, "benchmark.png", "benchmark.svg", REPORT_FILE]
    write_report([out_dir], out_dir / REPORT_FILE)
    console.say(f"saved in {out_dir}: {', '.join(files)}")


def _fields(config: BenchmarkConfig) -> dict:
    names = ("strategies", "num_devices", "repeats")
    return {**config.result_fields(), **{name: getattr(config, name) for name in names}}
