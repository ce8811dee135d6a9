"""Builds the part of a report about a verification: verdicts, first mismatch, differences."""

import math
from collections.abc import Sequence

from app.records.caveats import DATASET_CAVEATS, TIMING_CAVEAT, dataset_title, injected_fault_caveat
from app.records.pair_outcomes import outcome_sentences, verdict_sentence
from app.report.charts import Figure, Look, line_chart
from app.report.page_parts import (
    Cell,
    Heading,
    Items,
    Part,
    Table,
    Text,
    count,
    devices_text,
    number,
    whole,
)
from app.report.record_finder import Record, reading
from app.report.tolerance_shares import FLOOR, MISMATCH_PANELS, PANELS, distinct_trainings, shares

_MARKS = {"bit-identical": "good", "equal within rounding": "good", "different": "bad"}


def verify_part(record: Record) -> Part:
    """Reads `verify.json`.

    Raises:
        OutputError: the file is damaged.
    """
    found = record.load("verify.json")
    if found is None:
        blocks = [Heading(record.label), Text("This verification is not finished: no verdict yet.")]
        return Part(record.label, blocks, [], {})
    with reading(record.path / "verify.json"):
        strategies = found["strategies"]
        blocks = [Heading(record.label), *_findings(strategies), Text(_setup(found))]
        pairs = [(tuple(map(str, p["strategies"])), str(p["outcome"])) for p in found["pairs"]]
        blocks += map(Text, outcome_sentences(pairs))
        blocks += [_pairs(found["pairs"])] * bool(found["pairs"])
        blocks += [_outcomes(strategies), *_shards(strategies), *_shares(found)]
        blocks += _apart(found["pairs"])
        return Part(
            record.label,
            blocks,
            _caveats(found),
            _environment(found),
            verdicts=[_verdict_item(record, found)],
        )


def _verdict_item(record: Record, found: dict) -> Items:
    has_findings = any(run["findings"] for run in found["strategies"].values())
    sentence = f"{record.label}: {verdict_sentence(found)}"
    return Items([sentence], "bad" if has_findings else "good")


def _setup(found: dict) -> str:
    num_devices = max(len(run["devices"]) for run in found["strategies"].values())
    return (
        f"{found['model']} on {dataset_title(found['dataset'])}, recipe {found['recipe']}, batch"
        f" {whole(found['global_batch_size'])}, learning rate"
        f" {number(found['learning_rate'], 'g')}, seed {found['seed']}, {found['precision']};"
        f" {count(int(found['steps']), 'step')} on {count(num_devices, 'device')}. Each step is"
        " compared with one device in float64, from the same state."
    )


def _findings(strategies: dict) -> list:
    items = [
        f"{name}: {str(finding['cause']).replace('_', ' ')}, {finding['where']}: {finding['text']}"
        for name, run in strategies.items()
        for finding in run["findings"]
    ]
    return [Items(items, "bad")] if items else []


def _pairs(pairs: Sequence[dict]) -> Table:
    header = ["pair", "verdict", "apart by", "relative", "in", "replica"]
    rows: list[list[Cell | str]] = [
        [" – ".join(pair["strategies"]), _verdict(pair["outcome"]), *_farthest(pair["differences"])]
        for pair in pairs
    ]
    return Table("Pairs of strategies after the last step", header, "llrrlr", rows)


def _farthest(differences: dict) -> list[str]:
    """Returns the largest difference of the weights after the last step, or of any values."""
    columns = ("step", "kind", "tensor", "replica_id", "absolute", "relative", "identical")
    rows = list(zip(*(differences.get(name, ()) for name in columns), strict=True))
    last = max((step for step, *_ in rows), default=0)
    apart = [row for row in rows if row[0] == last and not row[6]]
    apart = [row for row in apart if row[1] == "weights"] or apart
    if not apart:
        return ["0", "0", "", ""]
    worst = max(apart, key=lambda row: (math.isnan(row[4]), row[4]))
    _, kind, tensor, replica, absolute, relative, _ = worst
    where = str(kind) if kind == tensor else f"{kind}, {tensor}"
    return [number(absolute, ".2g"), number(relative, ".2g"), where, whole(replica)]


def _outcomes(strategies: dict) -> Table:
    header = (
        *("strategy", "devices", "each step", "first mismatch", "what", "tensor"),
        *("replica", "by", "rounding allows", "cause"),
    )
    # Without a mismatch there is nothing to add.
    shown = len(header) if any(run["findings"] for run in strategies.values()) else 3
    rows = [[name, *_outcome(run)][:shown] for name, run in strategies.items()]
    caption = (
        "Each step compared with one device that starts from the same state: bitwise identical in"
        " float32, or equal to float64 within rounding"
    )
    return Table(caption, header[:shown], "lllrllrrrl"[:shown], rows)


def _outcome(run: dict) -> list[Cell | str]:
    devices = devices_text(run["devices"], run["simulated_devices"])
    causes = ", ".join(str(each["cause"]).replace("_", " ") for each in run["findings"])
    late = "straggler, the numbers are right" if causes and not run["first_mismatch"] else ""
    outcome = Cell(late, "bad") if late else _verdict(run["outcome"])
    first = run["first_mismatch"]
    if not first:
        return [devices, outcome, "–", "", "", "", "", "", causes]
    # Upper bound of `absolute` if all differences are scaled equally.
    share = first["error"] / first["limit"] if first["limit"] else None
    allowed = number(first["absolute"] / share, ".2g") if share else "nothing"
    where = [whole(first["step"]), str(first["kind"]), str(first["tensor"])]
    by = number(first["absolute"], ".3g")
    return [devices, outcome, *where, whole(first["replica_id"]), by, allowed, causes]


def _verdict(outcome: str) -> Cell:
    return Cell(str(outcome), _MARKS.get(outcome, ""))


def _shards(strategies: dict) -> list[Text]:
    return [
        Text(
            f"{name}: BatchNorm normalises each shard separately. Over the whole batch the first"
            f" gradient is {number(run['effect_of_shards'], '.1%')} apart: another training by"
            " design, not a fault."
        )
        for name, run in strategies.items()
        if run["effect_of_shards"] is not None
    ]


def _worst(measured: dict) -> dict[str, dict[int, float]]:
    """Returns kind → step → the largest fraction of the tolerance over tensors and replicas."""
    worst: dict[str, dict[int, float]] = {}
    for (kind, *_), points in shares(measured).items():
        of_kind = worst.setdefault(kind, {})
        for step, share in points:
            of_kind[step] = max(share, of_kind.get(step, 0.0))
    return worst


def _shares(found: dict) -> list[Figure]:
    """Returns the largest fraction of the tolerance, for every checked training."""
    per_training = [
        (" = ".join(names), _worst(measured))
        for names, measured in distinct_trainings(found["strategies"])
    ]
    kinds = [
        kind
        for kind in {**PANELS, **MISMATCH_PANELS}
        if any(
            kind in worst and (kind in PANELS or max(worst[kind].values()) > 1)
            for _, worst in per_training
        )
    ]
    if not kinds:
        return []
    titles = {kind: {**PANELS, **MISMATCH_PANELS}[kind] for kind in kinds}
    charts = [
        line_chart(
            name,
            {titles[kind]: sorted(worst.get(kind, {}).items()) for kind in kinds},
            x_label="step",
            form=".2g",
            log=True,
            allowed=1.0,
        )
        for name, worst in per_training
    ]
    tables = [_share_table(name, worst, titles) for name, worst in per_training]
    legend = [(Look.of(index), titles[kind]) for index, kind in enumerate(kinds)]
    note = (
        "The largest of all tensors and replicas at each step. The band is what rounding can cause,"
        f" computed for each array; values below {FLOOR:g} are drawn on the lower edge. At the"
        " upper edge of the band is expected for a sum of two gradients: it has one rounding, and"
        " one is allowed."
    )
    title = "Error at each step, relative to what rounding allows"
    return [Figure(title, charts, legend, tables, note)]


def _share_table(name: str, worst: dict[str, dict[int, float]], titles: dict[str, str]) -> Table:
    """Returns a row for each step of a training and a column for each kind of array."""
    return Table(
        f"{name}: error relative to what is allowed, the largest of all tensors and replicas",
        ["step", *titles.values()],
        "l" + "r" * len(titles),
        [
            [str(step), *(_share(worst.get(kind, {}).get(step)) for kind in titles)]
            for step in sorted({step for steps in worst.values() for step in steps})
        ],
    )


def _share(share: float | None) -> Cell:
    if share is None:
        return Cell("–")
    text = f"≤ {FLOOR:g}" if share <= FLOOR else f"{share:.2g}"
    return Cell(text, "bad" if share > 1 else "")


def _apart(pairs: Sequence[dict]) -> list[Figure]:
    """Returns the difference of the weights of two trainings over the steps."""
    series: dict[str, list[tuple[int, float]]] = {}
    for pair in pairs:
        largest: dict[int, float] = {}
        columns = (pair["differences"].get(name, ()) for name in ("step", "kind", "absolute"))
        for step, kind, absolute in zip(*columns, strict=True):
            if kind == "weights":
                largest[step] = max(absolute, largest.get(step, 0.0))
        if any(largest.values()):
            series[" – ".join(pair["strategies"])] = sorted(largest.items())
    if not series:
        return []
    title = "Largest difference between two weights of a pair"
    chart = line_chart(title, series, x_label="step", form=".2g", log=True)
    rows = [
        [name, str(step), number(value, ".3g")] for name, points in series.items()
        for step, value in points
    ]  # fmt: skip
    table = Table(f"{title}, after each step", ["pair", "step", "largest difference"], "lrr", rows)
    note = (
        "How much rounding, or a fault, has been amplified since the start; the verdict depends on"
        " each single step. Pairs that are bitwise identical are left out: the axis has no zero."
    )
    legend = [(Look.of(index), name) for index, name in enumerate(series)]
    return [Figure("Difference between the weights of each pair", [chart], legend, [table], note)]


def _caveats(found: dict) -> list[str]:
    fault, dataset = found["injected_fault"], found["dataset"]
    caveats = [injected_fault_caveat(str(fault))] if fault else []
    caveats += [DATASET_CAVEATS[dataset]] if dataset in DATASET_CAVEATS else []
    simulated = any(run["simulated_devices"] for run in found["strategies"].values())
    return [*caveats, TIMING_CAVEAT] if simulated else caveats


def _environment(found: dict) -> dict[str, str]:
    runs = found["strategies"].values()
    devices = dict.fromkeys(devices_text(r["devices"], r["simulated_devices"]) for r in runs)
    return {
        "devices": ", ".join(devices),
        **{str(name): str(version) for name, version in found["versions"].items()},
        "images": dataset_title(found["dataset"]),
        "SHA-256 of the images": str(found["dataset_sha256"]),
    }
