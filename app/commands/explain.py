"""`explain`: a step told with its numbers, where its time goes, what more devices would do."""

from app.config import ExplainConfig
from app.performance.breakdown_output import EXPLAIN_FILE, print_explanation, write_explanation
from app.performance.rounds import measure
from app.performance.step_profile import print_step_profile, profile_step
from app.performance.step_time_breakdown import Design, break_down_step
from app.records.run_directory import RunDirectory, open_log, open_run_directory
from app.records.run_naming import default_out, named_path
from app.report.page import REPORT_FILE, write_report
from app.runtime import console
from app.runtime.progress_bar import StepProgress


def run(config: ExplainConfig) -> None:
    """Tells a step, measures it with one part left out at a time, and prints what follows."""
    path = named_path(config.out or default_out("explain", config.model))
    fields = {"num_devices": config.num_devices, "repeats": config.repeats}
    fields |= {"command": "explain", **config.result_fields()}
    with open_run_directory(path, fields) as run_directory:
        open_log(path)
        if not config.overwrite:
            run_directory.check_same_run()
        _explain(config, run_directory)


def _explain(config: ExplainConfig, run_directory: RunDirectory) -> None:
    first = config.for_training(num_devices=config.num_devices[0])
    with StepProgress(1) as progress:
        progress.start("making one step")
        profile, simulated = profile_step(first, progress.message)
        design = Design.of(config, simulated=simulated)
        measured = measure(
            design.cases,
            repeats=config.repeats,
            progress=progress,
            all_reduces_of=list(design.full.values()),
        )
    breakdown = break_down_step(design, measured)
    run_directory.start(overwrite=config.overwrite)
    out_dir = run_directory.path
    write_explanation(out_dir, config, profile, breakdown, measured.samples)
    print_step_profile(config, profile)
    print_explanation(config, breakdown, measured.samples)
    write_report([out_dir], out_dir / REPORT_FILE)
    console.say(f"saved in {out_dir}: {EXPLAIN_FILE}, {REPORT_FILE}")
