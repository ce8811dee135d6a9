"""`benchmark`: strategies, device counts, batches and precisions, timed in turn."""

from app import console
from app.commands.train import default_out, open_log
from app.config import Config
from app.progress import StepProgress
from app.records.report import REPORT_FILE, write_report
from app.records.run_directory import RunDirectory, named_path, open_run_directory
from app.speed.benchmark import (
    BENCHMARK_FILE,
    create_points,
    print_benchmark,
    write_benchmark,
)
from app.speed.comparison import all_comparisons
from app.speed.rounds import measure


def run(config: Config) -> None:
    """Measures every point, prints tables and remarks, and saves them with two figures."""
    points = create_points(config)
    path = named_path(config.out or default_out(config))
    with open_run_directory(path, {**_fields(config), "command": "benchmark"}) as run_directory:
        open_log(path)
        if not config.overwrite:
            run_directory.check_same_run()
        _benchmark(config, points, run_directory)


def _benchmark(config: Config, points: list, run_directory: RunDirectory) -> None:
    console.say(
        f"{console.count(len(points), 'point')} in {console.count(config.repeats, 'round')}, each"
        " point in a process of its own"
    )
    peaks = [
        points[0].config.for_training("single", precision=p)
        for p in config.precisions
        if p != "mixed_float16"
    ]
    with StepProgress(1) as progress:
        measured = measure(points, repeats=config.repeats, progress=progress, peaks=peaks)
    sampled, limits = measured.sampled, measured.peaks
    comparisons = all_comparisons(sampled)
    run_directory.start(overwrite=config.overwrite)
    out_dir = run_directory.path
    write_benchmark(out_dir, config, sampled, comparisons, limits)
    print_benchmark(sampled, comparisons, limits)
    from app.records.benchmark_plot import plot_benchmark

    files = [BENCHMARK_FILE, *plot_benchmark(out_dir / BENCHMARK_FILE, out_dir), REPORT_FILE]
    write_report([out_dir], out_dir / REPORT_FILE)
    console.say(f"saved in {out_dir}: {', '.join(files)}")


def _fields(config: Config) -> dict:
    names = ("models", "strategies", "counts", "global_batch_sizes", "precisions", "repeats")
    return {**config.result_fields(), **{name: getattr(config, name) for name in names}}
