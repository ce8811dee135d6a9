"""`benchmark`: times strategies, device counts, batch sizes and precisions in turn."""

from app.options import Config
from app.performance.benchmark_output import (
    BENCHMARK_FILE,
    create_cases,
    plot_benchmark,
    write_benchmark,
)
from app.performance.breakdown import break_down, cases_without
from app.performance.case import Case
from app.performance.case_comparison import all_comparisons
from app.performance.rounds import measure
from app.records.run_directory import RunDirectory, default_out, named_path, open_command_directory
from app.report.page import REPORT_FILE, write_report
from app.runtime import console
from app.runtime.progress_bar import Progress


def run(config: Config) -> None:
    """Measures every case, prints tables and caveats, and saves them with two figures."""
    cases = create_cases(config)
    path = named_path(config.output.out or default_out("benchmark", *config.benchmark.model))
    fields = {"strategies": config.strategies, **config.result_fields(), "command": "benchmark"}
    with open_command_directory(path, fields, overwrite=config.output.overwrite) as run_directory:
        _benchmark(config, cases, run_directory)


def _benchmark(config: Config, cases: list[Case], run_directory: RunDirectory) -> None:
    without = (
        {case: cases_without(case, config) for case in cases} if config.benchmark.breakdown else {}
    )
    extra = [each for parts in without.values() for each in parts.values()]
    measured = list(dict.fromkeys([*cases, *extra]))
    console.say(
        f"{console.count(len(measured), 'case')} in"
        f" {console.count(config.benchmark.repeats, 'round')}, each"
        " case in a process of its own"
    )
    with Progress(1) as progress:
        samples = measure(measured, repeats=config.benchmark.repeats, progress=progress)
    sample_of = dict(zip(measured, samples, strict=True))
    breakdowns = [
        break_down(sample_of[case], {name: sample_of[each] for name, each in parts.items()})
        for case, parts in without.items()
    ]
    comparisons = all_comparisons(samples)
    run_directory.start(overwrite=config.output.overwrite)
    out_dir = run_directory.path
    write_benchmark(out_dir, config, samples, comparisons, breakdowns).print()
    plot_benchmark(out_dir, samples, comparisons)
    files = [BENCHMARK_FILE, "benchmark.png", "benchmark.svg", REPORT_FILE]
    write_report([out_dir], out_dir / REPORT_FILE)
    console.say(f"saved in {out_dir}: {', '.join(files)}")
