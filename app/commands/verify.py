"""`verify`: checks that strategies compute the same training, or names the first mismatch."""

import itertools
import pathlib
import shutil
from collections.abc import Callable
from typing import NamedTuple

from app.options import Config
from app.options.names import FRAMEWORKS
from app.records.files import io_errors_as, publish, temporary_path
from app.records.run_directory import RunDirectory, open_command_directory
from app.records.run_naming import default_out, named_path
from app.report.page import REPORT_FILE, write_report
from app.runtime import console
from app.runtime.errors import ConfigError, MismatchError
from app.runtime.progress_bar import StepProgress
from app.verification import tasks
from app.verification.case_runner import verify_case
from app.verification.frameworks.framework_program import find_interpreters
from app.verification.frameworks.framework_recording import FrameworkRecorder
from app.verification.recorded import Checked, Recorded
from app.verification.run import Run
from app.verification.straggler import find_straggler
from app.verification.strategy_processes import StrategyProcesses
from app.verification.trace import Trace
from app.verification.trace_comparison import (
    PairDifference,
    compare_traces,
    first_sums_apart,
)
from app.verification.trace_runner import verify_traces
from app.verification.verdict import NO_CAUSE, PairVerdict, StrategyVerdict
from app.verification.verify_output import write_record


class Comparison(NamedTuple):
    """Holds the comparison of the traces of two strategies.

    Attributes:
        differences: of all values that both traces have.
        by_design: difference of the first gradients, if BatchNorm makes two different trainings of
            the strategies; else None.
    """

    differences: list[PairDifference]
    by_design: float | None


Comparisons = dict[tuple[str, str], Comparison]  # For each pair of strategies.


def run(config: Config) -> list[PairVerdict] | dict[str, Run]:
    """Records each strategy in a separate process, checks every step and reports the verdicts.

    Returns a `PairVerdict` for each pair of strategies; for a case, strategy → `Run`.

    Raises:
        MismatchError: a step differs from the reference, or a replica is a straggler.
    """
    if config.verification.traces:
        return verify_traces(config)
    if config.verification.case is not None:
        return verify_case(config)
    interpreters = find_interpreters([n for n in config.distribution.strategies if n in FRAMEWORKS])
    path = named_path(config.output.out or default_out("verify", config.training.model))
    fields = {
        "command": "verify",
        **config.result_fields(),
        "strategy": ",".join(config.distribution.strategies),
        "num_replicas": config.num_devices_of_all_workers,  # For data parallelism.
        "steps": config.verification.steps,
    }
    with open_command_directory(path, fields, overwrite=config.output.overwrite) as run_directory:
        # The directory stays unchanged until there is a result to write.
        traces = temporary_path(path / "traces")
        try:
            with io_errors_as(traces):
                traces.mkdir()
            frameworks = FrameworkRecorder(config, interpreters, traces)
            return _verify(config, run_directory, traces, frameworks)
        finally:
            shutil.rmtree(traces, ignore_errors=True)


def _verify(
    config: Config,
    run_directory: RunDirectory,
    traces: pathlib.Path,
    frameworks: FrameworkRecorder,
) -> list[PairVerdict]:
    progress = StepProgress(config.verification.steps)
    with progress, StrategyProcesses(config, traces, progress) as processes:
        recorded = _record(config, traces, processes, frameworks, progress)
        if (
            "single" in config.distribution.strategies
        ):  # While the other strategies are compared and checked.
            processes.record("single", *_recording(config, "single", recorded))
        comparisons = _compare(config, recorded, traces, {})
        _check_distinct(recorded, comparisons, processes)
        recorded |= processes.recorded()
        comparisons = _compare(config, recorded, traces, comparisons)
        stands_for = _check_distinct(recorded, comparisons, processes)
        checked = processes.checked()
    recorded = {name: recorded[name] for name in config.distribution.strategies}
    verdict_of = _verdicts(recorded, stands_for, checked)
    run_directory.start(overwrite=config.output.overwrite)
    run_directory.remove("traces")
    if config.verification.keep_traces:
        publish(traces, run_directory.path / "traces")
    pair_verdicts = [
        PairVerdict.of(
            verdict_of[pair[0]],
            verdict_of[pair[1]],
            comparisons[pair].differences,
            by_design=comparisons[pair].by_design,
        )
        for pair in itertools.combinations(config.distribution.strategies, 2)
    ]
    _report(config, run_directory.path, recorded, verdict_of, pair_verdicts)
    return pair_verdicts


def _record(
    config: Config,
    traces: pathlib.Path,
    processes: StrategyProcesses,
    frameworks: FrameworkRecorder,
    progress: StepProgress,
) -> dict[str, Recorded]:
    """Records every strategy except `single`, which depends on the others."""
    recorded: dict[str, Recorded] = {}
    for name in config.distribution.strategies:
        if name in FRAMEWORKS:
            recorded |= processes.recorded()  # Running both would slow down the recording.
            progress.start(f"recording {name}")
            recorded[name] = frameworks.record(name, traces / name, progress.message)
        elif name == "multi_worker":
            recorded |= processes.recorded()
            _, child, _ = _recording(config, name, recorded)
            progress.start(f"recording {name}")
            recorded[name] = tasks.record_on_workers(
                progress.message,
                child,
                config.verification.steps,
                traces / name,
                config.cluster.num_workers or 1,
            )
        elif name != "single":
            processes.record(name, *_recording(config, name, recorded))
    frameworks.remove_files()
    return recorded | processes.recorded()


def _recording(
    config: Config, name: str, recorded: dict[str, Recorded]
) -> tuple[Callable[..., Recorded], Config, tuple[tuple[int, ...], ...]]:
    """Returns the function that records a strategy, its configuration, and further arguments.

    `single` comes last. With BatchNorm, the number of shards is part of the training: `single` is
    then one-device training with BatchNorm per shard, as in the other strategies. With
    --batch_norm=sync, and if all other strategies have one shard, it is ordinary training.
    """
    has_fault = name == config.faulty_strategy
    inject = config.verification.inject if has_fault else None
    shard_weights = [
        tuple(run.shard_weights)
        for other, run in recorded.items()
        if run.has_batch_norm
        and run.num_shards > 1
        and config.for_training(other, inject=None).distribution.batch_norm == "average"
    ]
    if name == "single" and shard_weights:
        if has_fault:
            parallel = next(other for other in config.distribution.strategies if other != "single")
            raise ConfigError(
                f"--inject={config.verification.inject}: faults cannot be injected into single"
                " with BatchNorm,"
                f" which the reference trains; use strategy={parallel}"
            )
        return tasks.record_on_one_device, config.on_one_machine(), (shard_weights[0],)
    return tasks.record, config.for_training(name, inject=inject), ()


def _compare(
    config: Config,
    recorded: dict[str, Recorded],
    traces: pathlib.Path,
    known: Comparisons,
) -> Comparisons:
    """Returns `known` extended by all other pairs of recorded strategies."""
    comparisons = dict(known)
    for pair in itertools.combinations(config.distribution.strategies, 2):
        if pair in known or not recorded.keys() >= set(pair):
            continue
        first, second = (Trace(traces / name) for name in pair)
        normalised = {recorded[name].normalised_by for name in pair}
        with first, second:
            by_design = first_sums_apart(first, second) if len(normalised) > 1 else None
            comparisons[pair] = Comparison(compare_traces(first, second), by_design)
    return comparisons


def _check_distinct(
    recorded: dict[str, Recorded], comparisons: Comparisons, processes: StrategyProcesses
) -> dict[str, str]:
    """Starts the check of each trace; bitwise identical traces are checked once.

    Returns:
        Strategy → the first strategy with a bitwise identical trace, often the strategy itself.
    """
    stands_for: dict[str, str] = {}
    for name, run in recorded.items():
        same = [
            first
            for first in stands_for
            if stands_for[first] == first
            and recorded[first].split == run.split
            and all(
                difference.identical
                for pair, comparison in comparisons.items()
                if set(pair) == {first, name}
                for difference in comparison.differences
            )
        ]
        stands_for[name] = same[0] if same and not run.is_reference else name
        if stands_for[name] == name and not run.is_reference:
            processes.check(name, run)
    return stands_for


def _verdicts(
    recorded: dict[str, Recorded], stands_for: dict[str, str], checked: dict[str, Checked]
) -> dict[str, StrategyVerdict]:
    """Returns strategy → verdict."""
    unchecked = Checked([], None, None)
    verdict_of = {}
    for name, run in recorded.items():
        found = checked.get(stands_for[name], unchecked)
        straggler = find_straggler(run.send_sec, run.replica_weights)
        diagnosis = found.diagnosis
        if diagnosis and diagnosis.cause == NO_CAUSE and run.own_findings:
            diagnosis = run.own_findings[0]
        verdict_of[name] = StrategyVerdict(
            name, found.measurements, found.first_mismatch, diagnosis, straggler, run.split
        )
    return verdict_of


def _report(
    config: Config,
    path: pathlib.Path,
    recorded: dict[str, Recorded],
    verdict_of: dict[str, StrategyVerdict],
    pair_verdicts: list[PairVerdict],
) -> None:
    """Writes and prints the verdicts; raises `MismatchError` for the first finding."""
    from app.report.verification_plot import plot_verification

    result = write_record(path, config, recorded, verdict_of, pair_verdicts)
    console.say()
    result.print()
    plot_verification(path)
    write_report([path], path / REPORT_FILE)
    kept = ", traces" if config.verification.keep_traces else ""
    console.say(f"saved in {path}: verify.json, verify.png, verify.svg, {REPORT_FILE}{kept}")
    console.say(f"open {path / REPORT_FILE} for the verdict and all differences on one page")
    for name, verdict in verdict_of.items():
        what = "does not match" if verdict.first_mismatch else "has a straggler"
        for finding in verdict.findings():
            raise MismatchError(f"{name} {what}: {finding}; see {path / REPORT_FILE}")
