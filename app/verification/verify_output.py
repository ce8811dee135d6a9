"""What `verify` found, for a person and for a program."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from app.config import VerifyConfig
from app.records.caveats import DATASET_CAVEATS, injected_fault_caveat
from app.records.files import write_json
from app.runtime import console
from app.verification.measurement import Measurement
from app.verification.tasks import Recorded
from app.verification.trace import KINDS
from app.verification.verdict import IDENTICAL, PairVerdict, StrategyVerdict

VERIFY_FILE = "verify.json"


def write_record(
    path: pathlib.Path,
    config: VerifyConfig,
    recorded: Mapping[str, Recorded],
    strategy_verdicts: Mapping[str, StrategyVerdict],
    verdicts: Sequence[PairVerdict],
) -> None:
    """Writes `verify.json`: everything that was measured."""
    first = next(iter(recorded.values()))
    write_json(
        path / VERIFY_FILE,
        {
            "command": "verify",
            "injected_fault": str(config.fault or ""),
            "model": config.model,
            "recipe": config.recipe,
            "global_batch_size": config.global_batch_size,
            "learning_rate": first.learning_rate,
            "seed": config.seed,
            "steps": config.steps,
            "batch_norm": config.batch_norm,
            "dataset": first.dataset,
            "dataset_sha256": first.dataset_sha256,
            "num_train_examples": first.num_train_examples,
            "precision": config.precision,
            "tf32": False,
            "versions": first.versions,
            "kinds": KINDS,
            "strategies": {
                name: {
                    "devices": run.devices,
                    "simulated_devices": run.simulated_devices,
                    "outcome": "is the reference"
                    if run.is_reference
                    else strategy_verdicts[name].outcome,
                    "findings": [
                        dataclasses.asdict(finding)
                        for finding in strategy_verdicts[name].findings()
                    ],
                    "first_mismatch": strategy_verdicts[name].first_mismatch
                    and dataclasses.asdict(strategy_verdicts[name].first_mismatch),
                    "effect_of_shards": run.effect_of_shards,
                    "send_sec": run.send_sec,
                    "measurements": _as_table(strategy_verdicts[name].measurements),
                }
                for name, run in recorded.items()
            },
            "pairs": [
                {
                    "strategies": verdict.strategies,
                    "outcome": verdict.outcome,
                    "differences": _as_table(verdict.differences),
                }
                for verdict in verdicts
            ],
        },
    )


def _as_table(rows: Sequence) -> dict[str, list]:
    """Turns records into columns: a name is written once, not once for each record."""
    if not rows:
        return {}
    return {
        field.name: [getattr(row, field.name) for row in rows]
        for field in dataclasses.fields(rows[0])
    }


def print_report(
    config: VerifyConfig,
    recorded: Mapping[str, Recorded],
    strategy_verdicts: Mapping[str, StrategyVerdict],
    verdicts: Sequence[PairVerdict],
) -> None:
    """Prints the verdicts, what they rest on, and the cause of what is false."""
    first = next(iter(recorded.values()))
    num_replicas = max(len(run.devices) for run in recorded.values())
    console.say(
        f"{config.model} on {first.dataset}, recipe {config.recipe}, batch"
        f" {config.global_batch_size}, learning rate {first.learning_rate:g}, seed {config.seed};"
        f" {console.count(config.steps, 'step')} on {console.count(num_replicas, 'replica')};"
        f" {config.precision}, TF32 off"
    )
    if config.fault:
        console.warn(injected_fault_caveat(str(config.fault)))
    if first.dataset in DATASET_CAVEATS:
        console.warn(DATASET_CAVEATS[first.dataset])
    single = recorded.get("single")
    if single and single.is_reference:
        console.say(
            f"single: one device, with BatchNorm over {num_replicas} shards one after another, as"
            f" {num_replicas} replicas have it (--batch_norm=average). Over the whole batch, as"
            f" `train --strategy=single` has it, the first gradient is"
            f" {single.effect_of_shards:.1%} apart: another training by design, not a fault"
        )
    if verdicts:
        console.say()
        console.print_table(
            f"Side by side: how far apart after {console.count(config.steps, 'step')}",
            ["pair", "verdict", "apart by", "relative", "ULPs", "in"],
            [_pair_row(verdict) for verdict in verdicts],
        )
        console.say("apart: what rounding has grown to; the verdict rests on the single steps")
    console.say()
    console.print_table(
        "Each step against one device in float64, from the same state: the largest difference",
        ["strategy", "what", "difference", "relative", "ULPs", "allowed", "from float32"],
        [row for group in _groups(strategy_verdicts.values()) for row in _verdict_rows(group)],
    )
    console.say("allowed: how far rounding can carry it, computed for every array")
    console.say("from float32: the largest difference from one device in float32; 0: the same bits")
    for strategy_verdict in strategy_verdicts.values():
        for finding in strategy_verdict.findings():
            what = "DIFFERENT" if strategy_verdict.first_mismatch else "HELD UP"
            console.say()
            console.say(f"{strategy_verdict.strategy} is {what}: {finding.cause.replace('_', ' ')}")
            console.say(f"  where  {finding.where}")
            console.say(f"  why    {finding.text}")


def conclusions(
    config: VerifyConfig,
    strategy_verdicts: Mapping[str, StrategyVerdict],
    verdicts: Sequence[PairVerdict],
) -> list[str]:
    """Returns the verdict in a few words, and what a fault lab has to admit."""
    lines = [f"{' and '.join(v.strategies)}: {v.outcome}" for v in verdicts]
    if not verdicts:
        steps = console.count(config.steps, "step")
        lines = [
            f"{name}: {steps}, {strategy_verdict.outcome} against one device"
            + (" in float32" if strategy_verdict.outcome == IDENTICAL else "")
            for name, strategy_verdict in strategy_verdicts.items()
        ]
    if config.fault and all(
        strategy_verdict.holds for strategy_verdict in strategy_verdicts.values()
    ):
        lines.append(
            f"the injected fault was not found: {config.fault} makes too little difference here"
        )
    return lines


def _pair_row(verdict: PairVerdict) -> list[str]:
    name = " – ".join(verdict.strategies)
    if verdict.outcome == IDENTICAL:
        return [name, verdict.outcome, "0", "0", "0", "everything"]
    worst = verdict.farthest_in_the_end()
    return [
        name,
        verdict.outcome,
        f"{worst.absolute:.2g}",
        f"{worst.relative:.2g}",
        _ulps(worst.ulps),
        worst.kind if worst.kind == worst.tensor else f"{worst.kind}, {worst.tensor}",
    ]


def _groups(strategy_verdicts: Iterable[StrategyVerdict]) -> list[list[StrategyVerdict]]:
    """Puts trainings together that hold the same bits: they share their measurements."""
    groups: list[list[StrategyVerdict]] = []
    for strategy_verdict in strategy_verdicts:
        same = (group for group in groups if group[0].measurements is strategy_verdict.measurements)
        group = next(same, None)
        if group:
            group.append(strategy_verdict)
        else:
            groups.append([strategy_verdict])
    return groups


def _verdict_rows(group: Sequence[StrategyVerdict]) -> list[list[str]]:
    strategy_verdict, name, rows = (
        group[0],
        " = ".join(strategy_verdict.strategy for strategy_verdict in group),
        [],
    )
    for kind in KINDS:
        measured = [m for m in strategy_verdict.measurements if m.kind == kind]
        if kind in ("examples", "agreement"):
            measured = [m for m in measured if not m.holds]
        if measured:
            rows.append(_kind_row(name if not rows else "", kind, measured))
    return rows


def _kind_row(name: str, kind: str, measured: Sequence[Measurement]) -> list[str]:
    """Shows the array that is nearest to what is allowed, or farthest beyond it."""
    worst = max(measured, key=lambda m: (not m.holds, m.excess))
    if kind == "examples":
        return [name, f"✗ {kind}", f"{worst.absolute:.0f} wrong", "", "", "none", ""]
    return [
        name,
        kind if worst.holds else f"✗ {kind}",
        f"{worst.absolute:.2g}",
        f"{worst.relative:.1g}",
        _ulps(worst.ulps),
        f"{worst.tolerance:.2g}" if worst.limit and worst.excess else "–",
        f"{max(m.absolute32 for m in measured):.2g}",
    ]


def _ulps(ulps: int) -> str:
    return f"{ulps:,}" if ulps < 1_000_000 else "> 1e6"
