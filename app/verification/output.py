"""Shows the results of `verify`: prints them, and writes `verify.json` and the page."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from app import console
from app.errors import DataError, DivergedError, MismatchError
from app.options import Config
from app.options.rules import faulty_strategy
from app.records.files import write_json
from app.records.history import DATASET_CAVEATS, injected_fault_caveat
from app.report.page import IDENTICAL, REPORT_FILE, write_report
from app.verification.verify import EQUAL, Training
from lockstep.answer.json import record_of
from lockstep.answer.text import describe, facts_lines, named_steps
from lockstep.engine.verdict import FAULT, NOT_COMPARED, NOT_VERIFIED, NOTHING

VERIFY_FILE = "verify.json"
_MOST_LINES = 3  # Pairs with a line each; more pairs are grouped.


def report(
    config: Config,
    path: pathlib.Path,
    trainings: Mapping[str, Training],
    pairs: Sequence[Mapping[str, Any]],
) -> None:
    """Prints the verdicts, and writes `verify.json` and the page.

    Args:
        config: options of the command.
        path: the run directory.
        trainings: strategy → result.
        pairs: the pairs of strategies, as `verify.json` has them.

    Raises:
        MismatchError: a training has a fault.
        DivergedError: every step is right, and a training diverges.
        DataError: a training has nothing to verify, or is not verified.
    """
    facts = _facts(config, trainings)
    records = {
        name: {
            **record_of(each.verdict),
            "devices": list(each.recorded.devices),
            "simulated_devices": each.recorded.facts["simulated_devices"],
            "diverged_step": each.diverged_step,
        }
        for name, each in trainings.items()
    }
    record = {"command": "verify", "trainings": records, "pairs": list(pairs), "facts": facts}
    write_json(path / VERIFY_FILE, record)
    write_report([path], path / REPORT_FILE)
    _print(config, trainings, pairs, facts)
    console.say()
    console.say(f"saved in {path}: {VERIFY_FILE}, {REPORT_FILE}")
    _raise_problem(path / REPORT_FILE, trainings)


def _facts(config: Config, trainings: Mapping[str, Training]) -> dict[str, Any]:
    """Returns how all strategies were trained."""
    first, fields = next(iter(trainings.values())), config.result_fields()
    shared = ("model", "recipe", "global_batch_size", "seed", "batch_norm", "precision")
    of_data = {
        name: value for name, value in first.recorded.facts.items() if name != "simulated_devices"
    }
    fault = str(config.fault or "")
    return {"injected_fault": fault, **{n: fields[n] for n in shared}, "tf32": False, **of_data}


def _print(
    config: Config,
    trainings: Mapping[str, Training],
    pairs: Sequence[Mapping[str, Any]],
    facts: Mapping[str, Any],
) -> None:
    verdicts = [training.verdict for training in trainings.values()]
    console.say(describe(verdicts))
    console.say()
    for line in outcome_lines(pairs):
        console.say(line)
    longest = max(verdicts, key=lambda verdict: len(verdict.steps))
    devices = max(len(training.recorded.devices) for training in trainings.values())
    shown = {
        "training": f"{facts['model']} on {facts['dataset']}, recipe {facts['recipe']}, batch"
        f" {facts['global_batch_size']}, learning rate {facts['learning_rate']:g}, seed"
        f" {facts['seed']}, {console.count(devices, 'device')}, {facts['precision']}, TF32 off",
        "verified": ", ".join(named_steps([longest.name_of(step) for step in longest.steps])),
        "tolerances": "; ".join(dict.fromkeys(v.tolerance.partition(";")[0] for v in verdicts)),
    }
    console.say("\n".join(facts_lines("", shown)))
    if config.fault:
        fault = f"{config.fault} in {faulty_strategy(config)}"
        console.warn(injected_fault_caveat(fault))
        if all(verdict.status != FAULT for verdict in verdicts):
            console.warn(
                f"the injected fault was not found: {config.fault} makes too little difference here"
            )
    if facts["dataset"] in DATASET_CAVEATS:
        console.warn(DATASET_CAVEATS[facts["dataset"]])


def outcome_lines(pairs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Returns a sentence for each pair, or for each outcome of many pairs, and the reasons."""
    lines, names = [], dict[str, list[str]]()
    for pair in pairs:
        outcome, differs = pair["outcome"], pair["outcome"] != IDENTICAL
        if outcome == EQUAL:
            outcome = f"each step {EQUAL} (the order of summation differs)"
        if len(pairs) <= _MOST_LINES:
            size = f"; weights end {pair['absolute']:.2g} apart" if differs else ""
            lines.append(f"{' and '.join(pair['trainings'])}: {outcome}{size}")
        names.setdefault(outcome, []).append(" – ".join(pair["trainings"]))
    if len(pairs) > _MOST_LINES:
        for outcome, same in names.items():
            lines.append(f"{outcome}: {'all pairs' if len(names) == 1 else ', '.join(same)}")
    return [*lines, *dict.fromkeys(pair["why"] for pair in pairs if pair["why"])]


def _raise_problem(page: pathlib.Path, trainings: Mapping[str, Training]) -> None:
    """Raises the error that the exit code of the command tells, if there is one."""

    def with_status(status: str) -> str:
        return ", ".join(n for n, each in trainings.items() if each.verdict.status == status)

    if faulty := with_status(FAULT):  # The verdicts are printed above.
        raise MismatchError(f"mismatch in {faulty}; see {page}")
    for name, training in trainings.items():
        if training.diverged_step:
            raise DivergedError(
                f"the training diverges: a value of {name} is not finite after step"
                f" {training.diverged_step}, and every step is right; use a smaller"
                " --learning_rate, or fewer --steps"
            )
    for status in (NOTHING, NOT_COMPARED, NOT_VERIFIED):
        if names := with_status(status):
            raise DataError(f"{status} in {names}; see {page}")
