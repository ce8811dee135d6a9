"""Describes the results of `verify`, and writes them to `verify.json`."""

import dataclasses
import pathlib
from collections.abc import Iterable, Mapping, Sequence

from app.options import Config
from app.records.caveats import DATASET_CAVEATS, injected_fault_caveat
from app.records.files import write_json
from app.report.result import BAD, GOOD, Block, Facts, Result, Table
from app.runtime import console
from app.verification.measurement import Measurement
from app.verification.pair_outcomes import IDENTICAL, outcome_sentences, verdict_sentence
from app.verification.recorded import Recorded
from app.verification.trace import KIND_TITLES, KINDS
from app.verification.verdict import PairVerdict, StrategyVerdict

VERIFY_FILE = "verify.json"
_AT_BOUND = 0.995  # Of what is allowed.


def write_record(
    path: pathlib.Path,
    config: Config,
    recorded: Mapping[str, Recorded],
    verdict_of: Mapping[str, StrategyVerdict],
    pair_verdicts: Sequence[PairVerdict],
) -> Result:
    """Writes `verify.json` with all measurements, and returns the result in words and tables."""
    first = next(iter(recorded.values()))
    record = {
        "command": "verify",
        "injected_fault": str(config.verification.fault or ""),
        "model": config.training.model,
        "recipe": config.training.recipe,
        "global_batch_size": config.training.global_batch_size,
        "learning_rate": first.learning_rate,
        "seed": config.training.seed,
        "steps": config.verification.steps,
        "batch_norm": config.distribution.batch_norm,
        "dataset": first.dataset,
        "dataset_sha256": first.dataset_sha256,
        "num_train_examples": first.num_train_examples,
        "precision": config.training.precision,
        "tf32": False,
        "versions": first.versions,
        "kinds": KINDS,
        "strategies": {
            name: _strategy_record(run, verdict_of[name]) for name, run in recorded.items()
        },
        "pairs": [
            {
                "strategies": pair.strategies,
                "outcome": pair.outcome,
                "by_design": pair.by_design,
                "differences": _as_table(pair.differences),
            }
            for pair in pair_verdicts
        ],
    }
    result = _describe(record, config, recorded, verdict_of, pair_verdicts)
    write_json(path / VERIFY_FILE, {**record, "shown": result.to_record()})
    return result


def _strategy_record(run: Recorded, verdict: StrategyVerdict) -> dict:
    first = verdict.first_mismatch
    return {
        "devices": run.devices,
        "num_replicas": run.num_replicas,
        "num_shards": run.num_shards,
        "num_copies": run.num_copies,
        "shard_weights": run.shard_weights,
        "syncs_batch_norm": run.syncs_batch_norm,
        "simulated_devices": run.simulated_devices,
        "outcome": "is the reference" if run.is_reference else verdict.outcome,
        "findings": [dataclasses.asdict(finding) for finding in verdict.findings()],
        "first_mismatch": dataclasses.asdict(first) if first else None,
        "effect_of_shards": run.effect_of_shards,
        "skipped_steps": run.skipped_steps,
        "send_sec": run.send_sec,
        "measurements": _as_table(verdict.measurements),
    }


def _as_table(rows: Sequence) -> dict[str, list]:
    """Converts records to columns, so that each name is written once."""
    if not rows:
        return {}
    return {
        field.name: [getattr(row, field.name) for row in rows]
        for field in dataclasses.fields(rows[0])
    }


def _describe(
    record: Mapping,
    config: Config,
    recorded: Mapping[str, Recorded],
    verdict_of: Mapping[str, StrategyVerdict],
    pair_verdicts: Sequence[PairVerdict],
) -> Result:
    """Describes the verdict in one sentence, the outcomes, each finding and all differences."""
    blocks: list[Block] = [*_conclusions(config, verdict_of, pair_verdicts)]
    for name, verdict in verdict_of.items():
        what = "does not match" if verdict.first_mismatch else "has a straggler"
        for finding in verdict.findings():
            title = f"{name} {what}: {finding.cause.replace('_', ' ')}"
            blocks.append(Facts(title, {"where": finding.where, "why": finding.text}))
    blocks += ["", *_setup(config, recorded)]
    if pair_verdicts:
        blocks += [
            Table(
                "Side by side: how far apart after"
                f" {console.count(config.verification.steps, 'step')}",
                ["pair", "verdict", "apart by", "relative", "in"],
                [_pair_row(pair) for pair in pair_verdicts],
            ),
            "the verdict depends on each single step, not on how far apart the ends are",
            *_by_design(recorded, pair_verdicts),
        ]
    for name, run in recorded.items():
        if run.skipped_steps:
            steps = ", ".join(map(str, run.skipped_steps))
            blocks.append(
                f"{name} skipped {console.count(len(run.skipped_steps), 'step')}, as a gradient"
                f" overflowed in float16 ({steps}); others may skip other steps"
            )
    blocks += [
        Table(
            "Each step compared with one device in float64 from the same state: largest difference",
            ["strategy", "what", "difference", "relative", "allowed", "of allowed", "from float32"],
            [row for group in _groups(verdict_of.values()) for row in _group_rows(group)],
        ),
        "allowed: what rounding can cause, computed for each array",
        "from float32: difference from one device in float32; 0: bitwise identical",
    ]
    if any(_is_at_bound(m) for v in verdict_of.values() for m in v.measurements):
        blocks.append(
            "sums at 100% are expected: a sum of two has one rounding, and one is allowed"
        )
    is_bad = any(verdict.findings() for verdict in verdict_of.values())
    verdicts = [(BAD if is_bad else GOOD, verdict_sentence(record))]
    return Result(verdicts, blocks, _caveats(config, next(iter(recorded.values()))))


def _caveats(config: Config, first: Recorded) -> list[str]:
    caveats = (
        [injected_fault_caveat(str(config.verification.fault))] if config.verification.fault else []
    )
    if first.dataset in DATASET_CAVEATS:
        caveats.append(DATASET_CAVEATS[first.dataset])
    return caveats


def _setup(config: Config, recorded: Mapping[str, Recorded]) -> list[str]:
    """Returns the settings of the training."""
    first = next(iter(recorded.values()))
    num_devices = max(len(run.devices) for run in recorded.values())
    lines = [
        f"{config.training.model} on {first.dataset}, recipe {config.training.recipe}, batch"
        f" {config.training.global_batch_size}, learning rate {first.learning_rate:g}, seed"
        f" {config.training.seed};"
        f" {console.count(config.verification.steps, 'step')} on"
        f" {console.count(num_devices, 'device')};"
        f" {config.training.precision}, TF32 off"
    ]
    for name, run in recorded.items():
        a_shard_each = run.num_shards == run.num_replicas == len(run.devices)
        if not (a_shard_each or run.is_reference):
            devices = console.count(len(run.devices), "device")
            lines.append(f"{name}: {run.split.describe()} on {devices}")
    single = recorded.get("single")
    if single and single.is_reference:
        lines.append(
            f"single: one device, with BatchNorm over {single.num_shards} shards one after another,"
            f" as replicas and micro-batches have it (--batch_norm=average). Over the whole batch,"
            f" as `train --strategy=single` has it, the first gradient is"
            f" {single.effect_of_shards:.1%} apart: another training by design, not a fault"
        )
    return lines


def _by_design(
    recorded: Mapping[str, Recorded], pair_verdicts: Sequence[PairVerdict]
) -> Iterable[str]:
    """Yields for which pairs BatchNorm makes two trainings, and the size of the effect."""
    for pair in pair_verdicts:
        if pair.by_design is not None:
            how = [_normalised(recorded[name]) for name in pair.strategies]
            yield (
                f"{' and '.join(pair.strategies)} are two trainings by design, not by a fault:"
                f" BatchNorm normalises {how[0]} in {pair.strategies[0]} and {how[1]} in"
                f" {pair.strategies[1]}; the first gradients are {pair.by_design:.1%} apart"
            )


def _normalised(run: Recorded) -> str:
    """Returns the parts that BatchNorm normalises."""
    if len(run.normalised_by) == 1:
        return "the whole batch"
    weights = run.normalised_by
    shares = f" of {':'.join(map(str, weights))}" if len(set(weights)) > 1 else ""
    return f"each of {len(weights)} shards{shares}"


def _conclusions(
    config: Config,
    verdict_of: Mapping[str, StrategyVerdict],
    pair_verdicts: Sequence[PairVerdict],
) -> list[str]:
    """Returns the outcome of each pair, and whether an injected fault was not found."""
    lines = outcome_sentences([(pair.strategies, pair.outcome) for pair in pair_verdicts])
    if config.verification.fault and all(verdict.passed for verdict in verdict_of.values()):
        lines.append(
            f"the injected fault was not found: {config.verification.fault} makes too little"
            " difference here"
        )
    return lines


def _pair_row(pair: PairVerdict) -> list[str]:
    name = " – ".join(pair.strategies)
    if pair.outcome == IDENTICAL:
        return [name, pair.outcome, "0", "0", "everything"]
    worst = pair.farthest_in_the_end()
    return [
        name,
        pair.outcome,
        f"{worst.absolute:.2g}",
        f"{worst.relative:.2g}",
        worst.kind if worst.kind == worst.tensor else f"{worst.kind}, {worst.tensor}",
    ]


def _groups(verdicts: Iterable[StrategyVerdict]) -> list[list[StrategyVerdict]]:
    """Groups bitwise identical trainings, which share their measurements."""
    groups: list[list[StrategyVerdict]] = []
    for verdict in verdicts:
        same = (group for group in groups if group[0].measurements is verdict.measurements)
        group = next(same, None)
        if group:
            group.append(verdict)
        else:
            groups.append([verdict])
    return groups


def _group_rows(group: Sequence[StrategyVerdict]) -> list[list[str]]:
    """Returns a row for each kind of array that the trainings of a group computed."""
    name = " = ".join(verdict.strategy for verdict in group)
    rows: list[list[str]] = []
    for kind in KINDS:
        measured = [m for m in group[0].measurements if m.kind == kind]
        if kind in ("examples", "agreement"):
            measured = [m for m in measured if not m.within_tolerance]
        if measured:
            rows.append(_kind_row(name if not rows else "", kind, measured))
    return rows


def _kind_row(name: str, kind: str, measured: Sequence[Measurement]) -> list[str]:
    """Returns a row with the array that is closest to its tolerance, or furthest beyond it."""
    worst = max(measured, key=lambda m: (not m.within_tolerance, m.excess))
    if kind == "examples":
        return [name, f"✗ {kind}", f"{worst.absolute:.0f} wrong", "", "none", "", ""]
    title = KIND_TITLES.get(kind, kind)
    has_limit = bool(worst.limit and worst.excess)
    return [
        name,
        title if worst.within_tolerance else f"✗ {title}",
        f"{worst.absolute:.2g}",
        f"{worst.relative:.1g}",
        f"{worst.tolerance:.2g}" if has_limit else "–",
        f"{worst.excess:.0%}" if has_limit and worst.excess < 1000 else "–",
        f"{max(m.absolute32 for m in measured):.2g}",
    ]


def _is_at_bound(measured: Measurement) -> bool:
    """Returns whether a sum differs by exactly one rounding, which is all that is allowed."""
    return measured.kind == "sums" and measured.within_tolerance and measured.excess > _AT_BOUND
