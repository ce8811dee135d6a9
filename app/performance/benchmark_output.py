"""Creates the cases of a benchmark, and prints and writes their results."""

import dataclasses
import itertools
import pathlib
import platform
import time
from collections.abc import Mapping, Sequence

from app.options import Config
from app.options.names import MULTI_WORKER, SINGLE
from app.performance import interval
from app.performance.breakdown import Breakdown
from app.performance.case import Case, Sample, split_names
from app.performance.case_comparison import AXIS_TITLES, Comparison
from app.records.caveats import DATASET_CAVEATS, TIMING_CAVEAT, dataset_title
from app.records.files import write_json
from app.report.result import Block, Result, Table
from app.runtime import console
from app.runtime.kernels import processor_name

BENCHMARK_FILE = "benchmark.json"


def create_cases(config: Config) -> list[Case]:
    """Returns a case for each combination; `single` has only one device.

    With `--breakdown`, only those on several devices.

    Raises:
        ConfigError: a case cannot be trained.
    """
    cases = []
    for model, precision, size, strategy, count in itertools.product(
        config.benchmark.model,
        config.benchmark.precision,
        config.benchmark.global_batch_size,
        config.distribution.strategies,
        config.benchmark.num_devices,
    ):
        if strategy == SINGLE and count != config.benchmark.num_devices[0]:
            continue
        if config.benchmark.breakdown and (strategy == SINGLE or count == 1):
            continue
        has_workers = strategy == MULTI_WORKER
        training = config.for_training(
            strategy,
            model=model,
            precision=precision,
            global_batch_size=size,
            num_devices=1 if has_workers else count,
            last_batch="drop",  # Every step has the same size.
        )
        num_workers = count if has_workers else 1
        cases.append(Case(training, num_workers, counts_traffic=config.benchmark.breakdown))
    return cases


def write_benchmark(
    out_dir: pathlib.Path,
    config: Config,
    samples: Sequence[Sample],
    comparisons: Sequence[Comparison],
    breakdowns: Sequence[Breakdown] = (),
) -> Result:
    """Writes `benchmark.json`: all blocks of all cases, and the result, which it returns."""
    result = _describe(samples, comparisons, breakdowns)
    record = {
        "command": "benchmark",
        "config": config.result_fields(),
        "written_by": "lockstep",
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"processor": processor_name(), "system": platform.platform()},
        "cases": [_case_record(s) for s in samples],
        "comparisons": [{**dataclasses.asdict(c), "verdict": c.verdict} for c in comparisons],
        "breakdowns": [dataclasses.asdict(b) for b in breakdowns],
        "shown": result.to_record(),
    }
    write_json(out_dir / BENCHMARK_FILE, record)
    return result


def _case_record(s: Sample) -> dict:
    config = s.case.config
    return {
        "name": s.case.name,
        "strategy": config.distribution.strategy,
        "model": config.training.model,
        "precision": config.training.precision,
        "num_devices": s.facts.num_devices,
        **dataclasses.asdict(s.facts),
        "images_per_sec": dataclasses.asdict(interval.median(s.rates)),
        "step_sec": dataclasses.asdict(interval.median(s.step_secs)),
        "peak_memory_bytes": s.peak_memory_bytes,
        "blocks": [dataclasses.asdict(block) for block in s.blocks],
    }


def _describe(
    samples: Sequence[Sample],
    comparisons: Sequence[Comparison],
    breakdowns: Sequence[Breakdown],
) -> Result:
    """Describes the cases, the comparisons, the breakdowns, and the caveats."""
    common, short = split_names([s.case.name for s in samples])
    table = Table(
        f"{common} on {samples[0].facts.dataset}: medians of"
        f" {console.count(len(samples[0].blocks), 'round')} with 95 % intervals, warm-up apart",
        ["", "images/s", "interval", "ms a step", "peak memory", "until compiled"],
        [_row(short[s.case.name], s) for s in samples],
    )
    blocks: list[Block] = [table]
    header = ["", "against", "speed-up", "interval", "ideal", "verdict"]
    for axis, group in itertools.groupby(comparisons, key=lambda c: c.axis):
        blocks.append(Table(AXIS_TITLES[axis], header, [_comparison_row(short, c) for c in group]))
    for breakdown in breakdowns:
        blocks += breakdown.describe(short[breakdown.case])
    said = dict.fromkeys(f"{c.axis}: {text}" for c in comparisons for text in c.caveats)
    facts = samples[0].facts
    caveats = [DATASET_CAVEATS[facts.dataset]] if facts.dataset in DATASET_CAVEATS else []
    caveats += [TIMING_CAVEAT] if any(s.facts.simulated_devices for s in samples) else []
    return Result([], [*blocks, *said], caveats)


def plot_benchmark(
    out_dir: pathlib.Path, samples: Sequence[Sample], comparisons: Sequence[Comparison]
) -> None:
    """Draws throughput and speed-ups with their intervals into `benchmark.png` and `.svg`."""
    from app.report.bar_plot import plot_bars

    common, short = split_names([s.case.name for s in samples])
    rates = {short[s.case.name]: interval.median(s.rates) for s in samples}
    speed_ups = {
        f"{short[c.case]} / {short[c.base]}, {c.axis}": c.speed_up
        for c in comparisons
        if c.speed_up
    }
    title = f"{common} on {dataset_title(samples[0].facts.dataset)}, {processor_name()}"
    if any(s.facts.simulated_devices for s in samples):
        title += f"\n{TIMING_CAVEAT}"
    panels = {"images per second, median with 95 % interval": rates, "speed-up": speed_ups}
    bars = {
        label: {name: (each.value, each.low, each.high) for name, each in rows.items()}
        for label, rows in panels.items()
    }
    plot_bars(title, bars, out_dir, "benchmark")


def _row(name: str, s: Sample) -> list[str]:
    rate, step = interval.median(s.rates), interval.median(s.step_secs)
    return [
        name,
        f"{rate.value:,.0f}",
        f"{rate.low:,.0f}–{rate.high:,.0f}",
        f"{step.value * 1e3:.1f}",
        f"{s.peak_memory_bytes / 2**20:,.0f} MiB",
        f"{s.facts.compile_sec:.1f} s",
    ]


def _comparison_row(short: Mapping[str, str], c: Comparison) -> list[str]:
    return [
        short[c.case],
        _difference(short[c.base], short[c.case]),
        f"{c.speed_up.value:.3f}" if c.speed_up else "–",
        f"{c.speed_up.low:.3f}–{c.speed_up.high:.3f}" if c.speed_up else "–",
        f"{c.ideal:g}" if c.ideal else "–",
        c.verdict,
    ]


def _difference(base: str, case: str) -> str:
    """Returns the parts of a name that another name does not have."""
    return ", ".join(part for part in base.split(", ") if part not in case.split(", "))
