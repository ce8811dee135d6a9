"""Shows the results of `verify`: prints them, writes `verify.json` and the page.

Strategies, cases and recordings have one output: a verdict on each training, the stages of its
steps, every finding with its cause and remedy, and how far each stage is from what is expected.
"""

import dataclasses
import itertools
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.options import Config
from app.records.files import publish, temporary_path, write_json
from app.records.run_directory import default_out, named_path, open_command_directory
from app.report.page import REPORT_FILE, write_report
from app.report.result import Block, Facts, Result, Table
from app.runtime import console
from app.runtime.errors import DataError, DivergedError, MismatchError
from lockstep.answer.html import cell_of, kind_of
from lockstep.answer.json import columns_of, finite, record_of, record_of_all
from lockstep.answer.text import (
    CLAUSES,
    explanations,
    largest_of,
    named_steps,
    notes_of,
    one_line,
    sentence_of,
    share_of,
)
from lockstep.answer.verdict import (
    FAULT,
    NOT_COMPARED,
    NOT_VERIFIED,
    NOTHING,
    STAGES,
    Measurement,
    Verdict,
)

IDENTICAL, EQUAL, DIFFERENT = "bit-identical", "equal within rounding", "different"
OTHER_TRAINING = "another training by design"
VERIFY_FILE = "verify.json"
_MOST_LINES = 3  # Pairs with a line each; more pairs are grouped.


@dataclasses.dataclass(frozen=True)
class Run:
    """A verified training.

    Attributes:
        verdict: the result of its verification.
        devices: names of the devices of all workers; empty if unknown.
        simulated_devices: whether several devices share a processor.
        versions: name → version of the software that affects the results.
        about: how it was trained, in words, where other trainings differ from it.
        facts: what `verify.json` has about it in addition.
        common_facts: what it has about all compared trainings.
        diverged_step: the first step, from 1, after which a loss or a variable is not finite; 0
            for none.
        exact: position of a step → the shards that are bitwise those of one device.
    """

    verdict: Verdict
    devices: Sequence[str] = ()
    simulated_devices: bool = False
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    about: str = ""
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    common_facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    diverged_step: int = 0
    exact: Mapping[int, frozenset[int]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two trainings, compared with each other.

    Attributes:
        trainings: names of the trainings.
        outcome: `IDENTICAL`, `EQUAL`, `DIFFERENT` or `OTHER_TRAINING`.
        absolute: the largest difference of any element after the last step.
        relative: that difference over the largest element of its array.
        where: the array with that difference, as in "weights, conv1/kernel".
        why: why they are two trainings by design; "" if they are not.
    """

    trainings: tuple[str, str]
    outcome: str
    absolute: float = 0.0
    relative: float = 0.0
    where: str = ""
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Results:
    """The results of the command.

    Attributes:
        runs: name of each training → its result.
        facts: what `verify.json` has about the command.
        setup: label → text: how the trainings were set up.
        pairs: comparisons of two trainings with each other.
        caveats: what makes the result differ from what a reader would expect.
    """

    runs: Mapping[str, Run]
    facts: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    setup: Mapping[str, str] = dataclasses.field(default_factory=dict)
    pairs: Sequence[Pair] = ()
    caveats: Sequence[str] = ()

    def with_status(self, status: str) -> str:
        """Returns the names of the trainings whose verdict has a status."""
        return ", ".join(name for name, run in self.runs.items() if run.verdict.status == status)


def verify_in_directory(
    config: Config,
    name: str,
    fields: Mapping[str, Any],
    verify: Callable[[pathlib.Path], Results],
) -> dict[str, Run]:
    """Verifies trainings and reports the results in a run directory.

    Earlier results stay in the directory until the verification ends without an error.

    Args:
        config: options of the command.
        name: what is verified, for the default name of the directory.
        fields: what `config.json` has about the command.
        verify: verifies the trainings, and may write recordings to the path that it is given, which
            `--keep_traces` publishes.

    Returns:
        Name of each training → its result.

    Raises:
        See `report`.
    """
    path = named_path(config.output.out or default_out("verify", name))
    overwrite, keeps_traces = config.output.overwrite, config.verification.keep_traces
    fields = {"command": "verify", **fields}
    with open_command_directory(path, fields, overwrite=overwrite) as run_directory:
        traces = temporary_path(path / "traces")
        try:
            results = verify(traces)
            run_directory.start(overwrite=True)  # An earlier verification is no run to resume.
            if keeps_traces:
                publish(traces, path / "traces")
        finally:
            shutil.rmtree(traces, ignore_errors=True)
        report(path, results, also=["traces"] if keeps_traces else [])
    return dict(results.runs)


def report(path: pathlib.Path, results: Results, also: Sequence[str] = ()) -> None:
    """Prints the verdicts and writes `verify.json`, the figure and the page.

    Args:
        path: the run directory.
        results: the results.
        also: names of other files in the directory.

    Raises:
        MismatchError: a training has a fault.
        DivergedError: every step is right, and a training diverges.
        DataError: a training has nothing to verify, or is not verified.
    """
    shown = describe(results)
    write_json(path / VERIFY_FILE, _record_of(results, shown))
    shown.print()
    files = [VERIFY_FILE, REPORT_FILE, *also]
    if measured := _equal_measurements(results.runs):
        from app.report.verification_plot import plot_verification

        plot_verification(measured, _step_names(results.runs), shown, path)
        files[1:1] = ["verify.png", "verify.svg"]
    write_report([path], path / REPORT_FILE)
    console.say()
    console.say(f"saved in {path}: {', '.join(files)}")
    console.say(f"open {path / REPORT_FILE} for the stages, causes and remedies on one page")
    if faulty := results.with_status(FAULT):  # The verdicts are printed above.
        raise MismatchError(f"mismatch in {faulty}; see {path / REPORT_FILE}")
    for name, run in results.runs.items():
        if run.diverged_step:
            raise DivergedError(
                f"the training diverges: a value of {name} is not finite after step"
                f" {run.diverged_step}, and every step is right; use a smaller --learning_rate, or"
                " fewer --steps"
            )
    for status in (NOTHING, NOT_COMPARED, NOT_VERIFIED):
        if names := results.with_status(status):
            raise DataError(f"{status} in {names}; see {path / REPORT_FILE}")


def _record_of(results: Results, shown: Result) -> dict[str, Any]:
    """Returns the content of `verify.json`."""
    verdicts = {name: run.verdict for name, run in results.runs.items()}
    return {
        **record_of_all(verdicts),
        "command": "verify",
        **results.facts,
        "versions": {k: v for run in results.runs.values() for k, v in run.versions.items()},
        "trainings": {
            name: {
                **record_of(run.verdict),
                "devices": list(run.devices),
                "simulated_devices": run.simulated_devices,
                "versions": dict(run.versions),
                "about": run.about,
                **run.facts,
                "measurements": columns_of(run.verdict),
            }
            for name, run in results.runs.items()
        },
        "pairs": [record_of_pair(pair) for pair in results.pairs],
        "shown": shown.to_record(),
    }


def record_of_pair(pair: Pair) -> dict[str, Any]:
    """Returns a pair in the form of JSON."""
    sizes = {"absolute": finite(pair.absolute), "relative": finite(pair.relative)}
    return dataclasses.asdict(pair) | sizes


def describe(results: Results) -> Result:
    """Describes the results in sentences and tables."""
    runs, verdicts = results.runs, [run.verdict for run in results.runs.values()]
    blocks: list[Block] = [
        one_line(f"{name}: {note}") for name, run in runs.items() for note in notes_of(run.verdict)
    ]
    blocks += outcome_sentences(results.pairs)
    blocks += itertools.starmap(Facts, explanations(verdicts))
    blocks += [_setup(results), _stages(runs), *_side_by_side(results)]
    if rows := _measured(runs):
        header = ["training", "stage", "difference", "allowed", "of allowed", "bitwise equal"]
        blocks += [
            Table("The largest difference of each stage, relative to its array", header, rows),
            "allowed: what rounding can cause, computed for each array; bitwise equal: to one"
            " device in float32",
        ]
    blocks += [
        one_line(
            f"{name}: all {len(run.verdict.measurements):,} arrays bitwise equal to one device"
        )
        for name, run in runs.items()
        if run.verdict.is_bitwise
    ]
    sentences = [(kind_of(verdict.status), sentence_of(verdict)) for verdict in verdicts]
    return Result(sentences, blocks, results.caveats)


def _setup(results: Results) -> Facts:
    """Returns how all and each were trained, the checked steps and the tolerances."""
    tolerances = [run.verdict.tolerance for run in results.runs.values()]
    shown = {
        **results.setup,
        **{name: run.about for name, run in results.runs.items()},
        "verified": ", ".join(named_steps(_step_names(results.runs))),
        "tolerances": "; ".join(dict.fromkeys(filter(None, tolerances))),
    }
    return Facts("", {one_line(label): one_line(text) for label, text in shown.items() if text})


def _step_names(runs: Mapping[str, Run]) -> list[str]:
    """Returns the names of the steps of the training that has most."""
    longest = max((run.verdict for run in runs.values()), key=lambda verdict: len(verdict.steps))
    return [longest.name_of(step) for step in longest.steps]


def _equal_measurements(runs: Mapping[str, Run]) -> dict[str, tuple[Measurement, ...]]:
    """Returns measurements by the names of all trainings that have the same ones."""
    names: dict[tuple[Measurement, ...], list[str]] = {}
    for name, run in runs.items():
        if run.verdict.measurements:
            names.setdefault(run.verdict.measurements, []).append(name)
    return {one_line(" = ".join(same)): measured for measured, same in names.items()}


def _stages(runs: Mapping[str, Run]) -> Table:
    """Returns the status of each stage in each training, and what the stage compares."""
    verdicts = [run.verdict for run in runs.values()]
    references = [one_line(verdict.reference) for verdict in verdicts if verdict.reference]
    against = f", compared with the {references[0]} from the same state" if references else ""
    rows = []
    for stage in STAGES:
        statuses = [verdict.status_of(stage) for verdict in verdicts]
        if any(status != "not checked" for status in statuses):
            rows.append([stage, *map(cell_of, statuses), CLAUSES[stage]])
    header = ["stage", *map(one_line, runs), "what is compared"]
    return Table(f"Each stage of each step{against}", header, rows)


def _measured(runs: Mapping[str, Run]) -> list[list[str]]:
    """Returns a row for each stage of each training: the array closest to its tolerance, or beyond.

    Trainings whose arrays are all bitwise equal have none.
    """
    rows = list[list[str]]()
    for label, measured in _equal_measurements(runs).items():
        if all(each.same_bits for each in measured):
            continue
        for stage, (worst, num_equal, number) in largest_of(measured).items():
            share = share_of(worst)
            rows.append(
                [
                    label,
                    stage if worst.is_within else f"✗ {stage}",
                    f"{worst.distance:.2g}",
                    f"{worst.allowed:.2g}" if worst.allowed else "–",
                    f"{share:.0%}" if share < 1000 else "–",
                    f"{num_equal} of {number}" if num_equal else "–",
                ]
            )
            label = ""
    return rows


def _side_by_side(results: Results) -> list[Block]:
    """Returns how far apart the trainings of each pair end, and which differ by design."""
    if all(pair.outcome == IDENTICAL for pair in results.pairs):
        return []
    steps = console.count(max(len(run.verdict.steps) for run in results.runs.values()), "step")
    rows = [
        [
            " – ".join(pair.trainings),
            f"{pair.absolute:.2g}",
            f"{pair.relative:.2g}",
            "everything" if pair.outcome == IDENTICAL else pair.where,
        ]
        for pair in results.pairs
    ]
    header = ["pair", "apart by", "relative", "in"]
    return [
        Table(f"Side by side: how far apart after {steps}", header, rows),
        "the verdict depends on each single step, not on how far apart the ends are",
        *(pair.why for pair in results.pairs if pair.why),
    ]


def _outcome(pair: Pair) -> str:
    order = "each step equal within rounding: the order of summation differs"
    return order if pair.outcome == EQUAL else pair.outcome


def outcome_sentences(pairs: Sequence[Pair]) -> list[str]:
    """Returns one sentence for each pair; for more than three pairs, one for each outcome."""
    if len(pairs) <= _MOST_LINES:
        return [f"{' and '.join(pair.trainings)}: {_outcome(pair)}" for pair in pairs]
    names: dict[str, list[str]] = {}
    for pair in pairs:
        names.setdefault(_outcome(pair), []).append(" – ".join(pair.trainings))
    return [
        f"{outcome}: {'all pairs' if len(same) == len(pairs) else ', '.join(same)}"
        for outcome, same in names.items()
    ]
