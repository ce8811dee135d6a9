"""Creates the cases of a benchmark, and describes and writes their results."""

import dataclasses
import itertools
import pathlib
import platform
import time
from collections.abc import Mapping, Sequence

from app.config import BenchmarkConfig
from app.config.names import MULTI_WORKER, SINGLE
from app.performance import interval
from app.performance.case import Case, Sample, split_names
from app.performance.comparability import setup_caveats
from app.performance.speed_comparison import Comparison
from app.records.caveats import DATASET_CAVEATS, TIMING_CAVEAT, dataset_title
from app.records.files import write_json
from app.report.result import Block, Result, Table
from app.runtime import console

BENCHMARK_FILE = "benchmark.json"


def create_cases(config: BenchmarkConfig) -> list[Case]:
    """Returns a case for each combination; `single` has only one device.

    Raises:
        ConfigError: a case cannot be trained.
    """
    cases = []
    for model, precision, size, strategy, count in itertools.product(
        config.model,
        config.precision,
        config.global_batch_size,
        config.strategies,
        config.num_devices,
    ):
        if strategy == SINGLE and count != config.num_devices[0]:
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
        cases.append(Case(training, num_workers=count if has_workers else 1))
    return cases


def write_benchmark(
    out_dir: pathlib.Path,
    config: BenchmarkConfig,
    samples: Sequence[Sample],
    comparisons: Sequence[Comparison],
    peaks: Mapping[str, Sequence[float]],
) -> Result:
    """Writes `benchmark.json`: all blocks of all cases, and the result, which it returns."""
    result = _describe(samples, comparisons, peaks)
    common, short = split_names([s.case.name for s in samples])
    write_json(
        out_dir / BENCHMARK_FILE,
        {
            "command": "benchmark",
            "config": config.result_fields(),
            "common": common,
            "written_by": "lockstep",
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "machine": {"processor": processor_name(), "system": platform.platform()},
            "caveats": setup_caveats(samples),
            "matrix_product_flops_per_sec": {p: list(rates) for p, rates in peaks.items()},
            "cases": [
                {"short_name": short[s.case.name], **_case_record(s, peaks)} for s in samples
            ],
            "comparisons": [{**dataclasses.asdict(c), "verdict": c.verdict} for c in comparisons],
            "shown": result.to_record(),
        },
    )
    return result


def _case_record(s: Sample, peaks: Mapping[str, Sequence[float]]) -> dict:
    config = s.case.config
    share = share_of_peak(s, peaks)
    return {
        "name": s.case.name,
        "strategy": config.strategy,
        "model": config.model,
        "precision": config.precision,
        "num_devices": s.facts.num_devices,
        **dataclasses.asdict(s.facts),
        "images_per_sec": dataclasses.asdict(interval.median(s.rates)),
        "step_sec": dataclasses.asdict(interval.median(s.step_secs)),
        "share_of_matrix_product_peak": share and dataclasses.asdict(share),
        "peak_memory_bytes": s.memory.peak_bytes,
        "memory_of_steps_bytes": s.memory.steps_bytes,
        "blocks": [dataclasses.asdict(block) for block in s.blocks],
    }


def share_of_peak(s: Sample, peaks: Mapping[str, Sequence[float]]) -> interval.Interval | None:
    """Returns achieved floating-point operations per second over those of a matrix product.

    The limit is that of one device with all cores. Several real devices have one limit each; the
    share is relative to the sum.
    """
    if s.case.config.precision not in peaks:
        return None
    num_limits = 1 if "CPU" in s.facts.devices[0] else s.facts.num_devices
    achieved = [rate * s.facts.flops_per_example / num_limits for rate in s.rates]
    return interval.ratio(achieved, peaks[s.case.config.precision])


def _describe(
    samples: Sequence[Sample],
    comparisons: Sequence[Comparison],
    peaks: Mapping[str, Sequence[float]],
) -> Result:
    """Describes the cases, the comparisons, and the caveats."""
    common, short = split_names([s.case.name for s in samples])
    table = Table(
        f"{common} on {samples[0].facts.dataset}: medians of"
        f" {console.count(len(samples[0].blocks), 'round')} with 95 % intervals, warm-up apart",
        ["", "images/s", "interval", "ms a step", "of peak", "peak memory", "until compiled"],
        [_row(short[s.case.name], s, peaks) for s in samples],
    )
    blocks: list[Block] = [table]
    for precision, rates in peaks.items():
        limit = interval.median(rates).value / 1e9
        blocks.append(f"peak: matrix products in {precision} at {limit:,.0f} GFLOP/s")
    header = ["", "against", "speed-up", "interval", "ideal", "verdict"]
    for axis, group in itertools.groupby(comparisons, key=lambda c: c.axis):
        blocks.append(Table(AXIS_TITLES[axis], header, [_comparison_row(short, c) for c in group]))
    said = dict.fromkeys(
        f"{c.axis}{' refused' if r.refuses else ''}: {r.text}"
        for c in comparisons
        for r in c.caveats
    )
    facts = [s.facts for s in samples]
    caveats = [DATASET_CAVEATS[f.dataset] for f in facts[:1] if f.dataset in DATASET_CAVEATS]
    caveats += [TIMING_CAVEAT] if any(f.simulated_devices for f in facts) else []
    return Result([], [*blocks, *setup_caveats(samples), *said], caveats)


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


AXIS_TITLES = {
    "strong scaling": "strong scaling: the same global batch, cut into more shards",
    "weak scaling": "weak scaling: the same batch for each device",
    "strategy": "strategies: the same training on as many devices",
    "precision": "precisions: the same training, computed in other types",
}


def _row(name: str, s: Sample, peaks: Mapping[str, Sequence[float]]) -> list[str]:
    rate, step = interval.median(s.rates), interval.median(s.step_secs)
    share = share_of_peak(s, peaks)
    return [
        name,
        f"{rate.value:,.0f}",
        f"{rate.low:,.0f}–{rate.high:,.0f}",
        f"{step.value * 1e3:.1f}",
        f"{share.value:.0%}" if share else "–",
        f"{s.memory.peak_bytes / 2**20:,.0f} MiB",
        f"{s.facts.compile_sec:.1f} s",
    ]


def _comparison_row(short: Mapping[str, str], c: Comparison) -> list[str]:
    return [
        short[c.case],
        short[c.base],
        f"{c.speed_up.value:.3f}" if c.speed_up else "–",
        f"{c.speed_up.low:.3f}–{c.speed_up.high:.3f}" if c.speed_up else "–",
        f"{c.ideal:g}" if c.ideal else "–",
        c.verdict,
    ]


def processor_name() -> str:
    """Returns the processor's name."""
    cpu_info = pathlib.Path("/proc/cpuinfo")
    if cpu_info.exists():
        for line in cpu_info.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
