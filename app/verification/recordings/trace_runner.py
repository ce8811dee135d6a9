"""Runs `verify --traces`: verifies recordings of users' scripts and reports the findings."""

import pathlib
from collections.abc import Sequence

from app.options import Config
from app.records.run_directory import open_command_directory
from app.records.run_naming import default_out, named_path
from app.records.script_trace import ScriptTrace, load_trace
from app.runtime.errors import DataError
from app.runtime.progress_bar import StepProgress
from app.verification.output import report
from app.verification.recordings.trace_verification import (
    TraceReport,
    between_frameworks,
    computed_tolerance,
    given_tolerance,
    verify_against,
    verify_alone,
)
from app.verification.run import Run
from lockstep.verdict import Finding, Verdict

_UNEXPLAINED = ("unexplained_gradient", "unexplained_update", "other_sum")


def verify_traces(config: Config) -> dict[str, Run]:
    """Verifies each recording on its own, and all further ones against the first.

    Returns:
        Name of the recording → result.

    Raises:
        DataError: a recording is damaged, or has nothing in common with the first.
        MismatchError: a recording has a fault.
    """
    traces, permuted = _load(config.verification.traces)
    path = named_path(
        config.output.out or default_out("verify", pathlib.Path(traces[-1].name).stem)
    )
    fields = {
        "command": "verify",
        "traces": [str(pathlib.Path(name).resolve()) for name in config.verification.traces],
        "name_map": list(config.verification.name_map),
        "tolerance": config.verification.tolerance,
    }
    with open_command_directory(path, fields, overwrite=config.output.overwrite) as run_directory:
        results = _verify(config, traces, permuted)
        run_directory.start(overwrite=config.output.overwrite)
        names = {"traces": [trace.name for trace in traces]}
        report(path, results, facts=names, setup={})
    return results


def _load(names: Sequence[str]) -> tuple[list[ScriptTrace], ScriptTrace | None]:
    """Opens recordings; returns those to verify, and the one with permuted examples."""
    loaded = [load_trace(pathlib.Path(name).expanduser()) for name in names]
    permuted = [trace for trace in loaded if trace.permuted is not None]
    traces = [trace for trace in loaded if trace.permuted is None]
    if not traces:
        raise DataError(
            f"{loaded[0].name}: is recorded with permute=, which only gives the tolerance; pass the"
            " recording to verify, too"
        )
    if len(permuted) > 1:
        raise DataError(f"{permuted[1].name}: is the second recording with permute=; pass only one")
    return traces, permuted[0] if permuted else None


def _verify(
    config: Config, traces: Sequence[ScriptTrace], permuted: ScriptTrace | None
) -> dict[str, Run]:
    first, *others = traces
    names = _short_names(traces)
    with StepProgress(sum(len(trace.steps) for trace in traces)) as progress:
        progress.start("reading recordings")
        tolerance = given_tolerance(config.verification.tolerance)
        if permuted is not None and config.verification.tolerance is None:
            tolerance = computed_tolerance(first, permuted, config.verification.names)
        alone = "that of float32 sums and updates"
        results = {
            names[0]: _run(names[0], verify_alone(first), "", tolerance.text if others else alone)
        }
        for name, other in zip(names[1:], others, strict=True):
            progress.start(f"comparing {name}")
            allowed = between_frameworks(tolerance, first, other)
            found = verify_against(first, other, config.verification.names, allowed)
            results[name] = _run(name, found, f"training of {names[0]}", allowed.text)
    return results


def _short_names(traces: Sequence[ScriptTrace]) -> list[str]:
    """Returns file names, with as many parent folders as needed to distinguish them."""
    paths = [pathlib.Path(trace.name).absolute() for trace in traces]
    for count in range(1, max(len(path.parts) for path in paths) + 1):
        short = [str(pathlib.Path(*path.parts[-count:])) for path in paths]
        if len(set(short)) == len(short):
            return short
    # The same file twice.
    return [f"{path.name} ({number})" for number, path in enumerate(paths, start=1)]


def _run(name: str, report: TraceReport, reference: str, tolerance: str) -> Run:
    trace = report.trace
    findings = []
    for found in report.findings:
        items = tuple(f"replica {replica}" for replica in found.replicas)
        where = found.steps, items, found.tensors, found.distance, found.allowed
        cause = "unexplained" if found.cause in _UNEXPLAINED else found.cause
        findings.append(Finding(found.stage, found.status, cause, found.text, *where))
    verdict = Verdict(
        name, reference, tuple(trace.steps), trace.num_replicas, tuple(findings),
        tuple(report.stages), tolerance, framework=trace.framework,
    )  # fmt: skip
    return Run(verdict, versions=dict(trace.versions), about=_about(report))


def _about(report: TraceReport) -> str:
    """Returns a description of a recording, and what could not be compared."""
    trace = report.trace
    version = f"{trace.framework} {trace.versions.get(trace.framework, '')}".rstrip()
    count = f"{trace.num_replicas} replica{'s' * (trace.num_replicas > 1)}"
    texts = [version, count]
    if trace.replayed:
        texts.append(f"from the states of {pathlib.Path(trace.replayed).name}")
    if report.skipped:
        numbers = ", ".join(map(str, report.skipped))
        texts.append(
            f"gradients of steps {numbers} not compared, which start from other states: record them"
            " with replay="
        )
    if report.unmatched:
        texts.append(f"not matched: {', '.join(report.unmatched)}")
    return ", ".join(texts)
