"""`explain`: prints a step with its numbers, its step-time breakdown and its communication."""

from app.config import ExplainConfig
from app.config.split_numbers import has_option
from app.performance import split_output
from app.performance.breakdown_output import (
    EXPLAIN_FILE,
    print_caveats,
    print_explanation,
    write_explanation,
)
from app.performance.case import Sample
from app.performance.rounds import measure
from app.performance.split_breakdown import SplitBreakdown, SplitDesign, break_down_split
from app.performance.split_profile import profile_split
from app.performance.step_profile import print_step_profile, profile_step
from app.performance.step_time_breakdown import Design, StepTimeBreakdown, break_down_step
from app.records.run_directory import RunDirectory, open_command_directory
from app.records.run_naming import default_out, named_path
from app.runtime import console
from app.runtime.processes import call_in_child_process
from app.runtime.progress_bar import StepProgress


def run(config: ExplainConfig) -> None:
    """Describes a step, measures it with one part left out at a time, and prints conclusions."""
    path = named_path(config.out or default_out("explain", config.model))
    fields = {"num_devices": config.num_devices, "repeats": config.repeats}
    fields |= {"command": "explain", **config.result_fields()}
    with open_command_directory(path, fields, overwrite=config.overwrite) as run_directory:
        _explain(config, run_directory)


def _explain(config: ExplainConfig, run_directory: RunDirectory) -> None:
    first = config.for_training(num_devices=config.num_devices[0])
    with StepProgress(1) as progress:
        progress.start("making one step")
        profile, simulated = profile_step(first, progress.message)
        progress.start("counting what a step sends")
        split = call_in_child_process(profile_split, first, on_message=progress.message)
        breakdown, samples = _measure(config, progress, simulated=simulated)
    run_directory.start(overwrite=config.overwrite)
    out_dir = run_directory.path
    write_explanation(out_dir, config, profile, breakdown, samples, split)
    print_step_profile(config, profile)
    if isinstance(breakdown, SplitBreakdown):
        split_output.print_split_breakdown(config, breakdown, samples[0].facts)
    else:
        print_explanation(config, breakdown, samples)
    split_output.print_traffic(split.traffic)
    split_output.print_held(split.held)
    if split.pipeline:
        split_output.print_pipeline(split.pipeline)
    print_caveats(samples)
    console.say(f"saved in {out_dir}: {EXPLAIN_FILE}")


def _measure(
    config: ExplainConfig, progress: StepProgress, *, simulated: bool
) -> tuple[StepTimeBreakdown | SplitBreakdown, list[Sample]]:
    """Measures a step with one part left out at a time, and returns the breakdown."""
    repeats = config.repeats
    if not has_option(config.strategy, "all_reduce"):  # No all-reduce to leave out.
        split_design = SplitDesign.of(config)
        measured = measure(split_design.cases, repeats=repeats, progress=progress)
        return break_down_split(split_design, measured), measured.samples
    design = Design.of(config, simulated=simulated)
    measured = measure(
        design.cases,
        repeats=repeats,
        progress=progress,
        all_reduces_of=list(design.full.values()),
    )
    return break_down_step(design, measured), measured.samples
