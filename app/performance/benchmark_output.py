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
_TWO_PRECISIONS = "one precision against another"


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
    training = samples[0].case.config.training
    title = (
        f"{common} on {dataset_title(samples[0].facts.dataset)}, recipe {training.recipe},"
        f" {processor_name()}"
    )
    if any(s.facts.simulated_devices for s in samples):
        title += f"\n{TIMING_CAVEAT}"
    panels, kinds = dict[str, dict[str, tuple[float, float, float]]](), dict[str, str]()
    for s in samples:  # Networks and batches, whose rates differ by far, have panels of their own.
        training, name = s.case.config.training, short[s.case.name]
        label = f"images per second, {training.model}, batch {training.global_batch_size}"
        panels.setdefault(label, {})[name] = dataclasses.astuple(interval.median(s.rates))
        kinds[name] = training.precision
    precisions = {s.case.name: s.case.config.training.precision for s in samples}
    for c in comparisons:
        if c.speed_up:
            name = f"{short[c.case]} / {_difference(short[c.base], short[c.case])}"
            label = f"speed-up, {c.axis}: images per second / images per second"
            panels.setdefault(label, {})[name] = dataclasses.astuple(c.speed_up)
            same = precisions[c.case] == precisions[c.base]
            kinds[name] = precisions[c.case] if same else _TWO_PRECISIONS
    plot_bars(title, panels, out_dir, "benchmark", kinds=kinds)


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
