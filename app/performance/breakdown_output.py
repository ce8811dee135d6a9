"""Writes and prints the results of `explain`."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

from app.config import ExplainConfig
from app.performance.benchmark_output import processor_name
from app.performance.case import Facts, Sample
from app.performance.comparability import setup_caveats
from app.performance.split_breakdown import SplitBreakdown
from app.performance.split_records import SplitProfile
from app.performance.step_time_breakdown import StepTimeBreakdown
from app.records.files import write_json
from app.runtime import console

EXPLAIN_FILE = "explain.json"


def write_explanation(
    out_dir: pathlib.Path,
    config: ExplainConfig,
    profile: dict,
    breakdown: StepTimeBreakdown | SplitBreakdown,
    samples: Sequence[Sample],
    split: SplitProfile,
) -> None:
    """Writes `explain.json`."""
    write_json(
        out_dir / EXPLAIN_FILE,
        {
            "written_by": "lockstep",
            "machine": {"processor": processor_name()},
            "config": config.result_fields(),
            "caveats": setup_caveats(samples),
            "step_profile": profile,
            **dataclasses.asdict(breakdown),
            "split": dataclasses.asdict(split),
            "cases": [dataclasses.asdict(s) for s in samples],
        },
    )


def print_explanation(
    config: ExplainConfig, breakdown: StepTimeBreakdown, samples: Sequence[Sample]
) -> None:
    """Prints the step-time breakdown, the all-reduce cost, and predictions for more devices."""
    facts = samples[0].facts
    print_parts(config, facts, breakdown, _METHODS)
    _print_all_reduce(breakdown, facts)
    _print_scaling(breakdown, samples)


def print_parts(
    config: ExplainConfig,
    facts: Facts,
    breakdown: StepTimeBreakdown | SplitBreakdown,
    methods: Mapping[str, str],
) -> None:
    """Prints the step-time breakdown.

    Args:
        config: options of the command.
        facts: properties of the measured training.
        breakdown: breakdown of a step.
        methods: name of a part → how it was measured.
    """
    step = breakdown.step_sec
    console.say()
    console.print_table(
        f"where a step of {config.strategy} on {console.count(facts.num_devices, 'device')} goes:"
        f" {step.value * 1e3:.2f} ms ({step.low * 1e3:.2f}–{step.high * 1e3:.2f}),"
        f" {config.model}, batch {facts.global_batch_size}",
        ["part", "ms", "95 % interval", "share", "how it was found"],
        [
            [
                part.name,
                f"{part.sec.value * 1e3:.2f}",
                f"{part.sec.low * 1e3:.2f} to {part.sec.high * 1e3:.2f}",
                f"{part.share.value:.1%}",
                methods[part.name],
            ]
            for part in breakdown.parts
        ],
    )


def print_caveats(samples: Sequence[Sample]) -> None:
    """Prints the caveats of these measurements."""
    for line in setup_caveats(samples):
        console.say(line)


_METHODS = {
    "compute": "one replica alone, same shard",
    "all-reduce": "the step, less one without it",
    "input": "the step, less one on a fixed batch",
    "everything else": "what is left: contention, waiting",
}


def _print_all_reduce(breakdown: StepTimeBreakdown, facts: Facts) -> None:
    model = breakdown.all_reduce_model
    rows = [
        [
            str(n),
            f"{time.size_bytes:,}",
            f"{time.sec * 1e3:.3f}",
            f"{time.bus_bytes_per_sec / 1e9:.2f}",
        ]
        for n, time in breakdown.gradient_all_reduce.items()
    ]
    console.print_table(
        f"the all-reduce alone: {facts.all_reduce}, without computation",
        ["devices", "bytes of each", "ms", "bus GB/s"],
        rows,
    )
    bandwidth = (
        f"{1 / model.sec_per_byte / 1e9:.3g} GB/s" if model.sec_per_byte else "no limit seen"
    )
    console.say(
        f"fitted: {model.latency_sec * 1e6:.3g} µs a step of the algorithm, {bandwidth} at its"
        " busiest place; bus: bytes · 2 (n − 1) / n over time"
    )


def _print_scaling(breakdown: StepTimeBreakdown, samples: Sequence[Sample]) -> None:
    facts = samples[0].facts
    console.say()
    rows = []
    for p in breakdown.predictions:
        if facts.simulated_devices and p.measured_sec is None:
            continue  # More logical devices on the same cores predict nothing.
        measured, error = "not measured", ""
        if p.measured_sec is not None:
            measured = f"{facts.global_batch_size / p.measured_sec:,.0f}"
            error = f"{p.error:+.1%}" + (", held out" if p.held_out else ", in the fit")
        rows.append(
            [
                str(p.num_replicas),
                f"{facts.global_batch_size / p.predicted_sec:,.0f}",
                measured,
                error,
            ]
        )
    shares = " on the same cores" if facts.simulated_devices else ""
    console.print_table(
        f"images/s with more devices{shares}, batch {facts.global_batch_size}",
        ["devices", "predicted", "measured", "error of step time"],
        rows,
    )
    console.say(
        f"predicted: ({breakdown.compute.fixed_sec * 1e3:.2f} ms +"
        f" {breakdown.compute.example_sec * 1e6:.1f} µs an example of the shard + all-reduce) ·"
        f" {1 + breakdown.overhead:.3f}"
    )
    cores = samples[-1].case.cores
    one = "one of them alone"
    if cores:
        one += f" on {console.count(cores, 'core')}"
    console.say(
        f"{console.count(facts.num_replicas, 'device')} against {one}:"
        f" speed-up {breakdown.speed_up}"
    )
    if facts.simulated_devices:
        console.say("break-even and more devices: not predicted from devices that share the cores")
    elif breakdown.break_even_batch is None:
        console.say("break-even: the time of a step does not depend on the batch, so there is none")
    else:
        console.say(
            "break-even: two devices beat one of them alone from a global batch of"
            f" {breakdown.break_even_batch:,.0f} on"
        )
