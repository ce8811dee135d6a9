"""Builds the part of a report about `benchmark` and `explain`."""

import itertools
from collections.abc import Sequence

from app.records.caveats import DATASET_CAVEATS, TIMING_CAVEAT, dataset_title
from app.report.charts import Figure, bar_chart
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
from app.report.split_part import split_blocks, throughput


def benchmark_part(record: Record) -> Part:
    """Reads `benchmark.json`.

    Raises:
        OutputError: the file is damaged.
    """
    found = record.load("benchmark.json")
    if found is None:
        return _unfinished(record)
    with reading(record.path / "benchmark.json"):
        cases = found["cases"]
        rounds = count(len(cases[0]["blocks"]), "round")
        setup = (
            f"{found['common']}; {dataset_title(cases[0]['dataset'])} on"
            f" {found['machine']['processor']}. Medians of {rounds} with 95 % intervals, without"
            " warm-up."
        )
        blocks = [Heading(record.label), Text(setup), *_caveat_items(found["caveats"])]
        blocks += [_throughput(cases), *_comparisons(found)]
        return Part(record.label, blocks, _caveats(cases), _environment(found, cases))


def explain_part(record: Record) -> Part:
    """Reads `explain.json`.

    Raises:
        OutputError: the file is damaged.
    """
    found = record.load("explain.json")
    if found is None:
        return _unfinished(record)
    with reading(record.path / "explain.json"):
        facts = [case["facts"] for case in found["cases"]]
        first, config = facts[0], found["config"]
        step = _interval(found["step_sec"], 1e3, ".2f")
        setup = (
            f"{config['strategy']} on {devices_text(first['devices'], first['simulated_devices'])},"
            f" {config['model']}, batch {whole(first['global_batch_size'])}: a step takes {step} ms"
            f" (median, 95 % interval) on {found['machine']['processor']}."
        )
        blocks = [Heading(record.label), Text(setup), *_caveat_items(found["caveats"])]
        blocks += [_step(found["parts"]), _step_profile(found["step_profile"])]
        if "gradient_all_reduce" in found:
            blocks += [_all_reduce(found, first), _predictions(found, first)]
            blocks.append(Text(_what_follows(found, first)))
        else:
            blocks.append(throughput(found, simulated=first["simulated_devices"]))
        if "split" in found:  # Older records have no "split".
            blocks += split_blocks(found["split"])
        return Part(record.label, blocks, _caveats(facts), _environment(found, facts))


def _unfinished(record: Record) -> Part:
    blocks = [Heading(record.label), Text(f"This {record.kind} is not finished: no numbers yet.")]
    return Part(record.label, blocks, [], {})


def _caveat_items(caveats: Sequence) -> list[Items]:
    return [Items([str(caveat) for caveat in caveats])] if caveats else []


def _interval(values: dict, scale: float, form: str) -> str:
    value, low, high = (scale * values[name] for name in ("value", "low", "high"))
    return f"{value:{form}} ({low:{form}}–{high:{form}})"


def _ends(values: dict, form: str, scale: float = 1.0, joint: str = "–") -> str:
    return f"{scale * values['low']:{form}}{joint}{scale * values['high']:{form}}"


def _throughput(cases: Sequence[dict]) -> Figure:
    rates = [(p["short_name"], *_three(p["images_per_sec"])) for p in cases]
    chart = bar_chart("images a second", rates, form=",.0f", unit="")
    header = ["case", "images/s", "95 % interval", "ms a step", "of peak", "peak memory"]
    rows = [
        [
            case["short_name"],
            number(case["images_per_sec"]["value"]),
            _ends(case["images_per_sec"], ",.0f"),
            number(1e3 * case["step_sec"]["value"], ".1f"),
            _share_of_peak(case["share_of_matrix_product_peak"]),
            number(case["peak_memory_bytes"] / 2**20, ",.0f", " MiB"),
        ]
        for case in cases
    ]
    table = Table("Throughput of each case", header, "lrrrrr", rows)
    note = "Bars are medians, their ends 95 % intervals. Of peak: against a bare matrix product."
    return Figure("Throughput", [chart], [], [table], note)


def _share_of_peak(share: dict | None) -> str:
    return number(share["value"], ".0%") if share else "–"


def _comparisons(found: dict) -> list:
    """Returns a table for each kind of comparison, a figure of the speed-ups, and the caveats."""
    short = {case["name"]: case["short_name"] for case in found["cases"]}
    compared = found["comparisons"]
    blocks: list[Table | Figure | Items] = []
    drawn = [
        (f"{short[c['case']]} against {short[c['base']]} ({c['axis']})", *_three(c["speed_up"]))
        for c in compared
        if c["speed_up"]
    ]
    header = ["case", "against", "speed-up", "95 % interval", "ideal", "efficiency", "verdict"]
    for axis, group in itertools.groupby(compared, key=lambda c: c["axis"]):
        rows = [_comparison(short, c) for c in group]
        blocks.append(Table(f"Speed-up: {axis}", header, "llrrrrl", rows))
    if drawn:
        chart = bar_chart("speed-up", drawn, form=".3f", unit="", reference=1.0)
        note = "The dotted line is 1: as fast as what it is compared with."
        numbers = [[name, *(number(v, ".3f") for v in values)] for name, *values in drawn]
        ends = ["compared", "speed-up", "from", "to"]
        table = Table("Speed-up with its 95 % interval", ends, "lrrr", numbers)
        title = "How much faster each case is than another"
        blocks.insert(0, Figure(title, [chart], [], [table], note))
    said = dict.fromkeys(
        f"{c['axis']}{', refused' if caveat['refuses'] else ''}: {caveat['text']}"
        for c in compared
        for caveat in c["caveats"]
    )
    return [*blocks, *_caveat_items(list(said))]


def _comparison(short: dict, c: dict) -> list[Cell | str]:
    speed_up, ideal = c["speed_up"], c["ideal"]
    numbers = ["–", "–", number(ideal, "g"), "–"]
    if speed_up:
        efficiency = speed_up["value"] / ideal if ideal else None
        numbers[:2] = [number(speed_up["value"], ".3f"), _ends(speed_up, ".3f")]
        numbers[3] = number(efficiency, ".0%")
    verdict = Cell(str(c["verdict"]), "differs" * (c["verdict"] == "refused"))
    return [short[c["case"]], short[c["base"]], *numbers, verdict]


def _step(parts: Sequence[dict]) -> Figure:
    bars = [(part["name"], *(1e3 * value for value in _three(part["sec"]))) for part in parts]
    chart = bar_chart("milliseconds of a step", bars, form=".2f", unit="ms")
    rows = [
        [
            part["name"],
            number(1e3 * part["sec"]["value"], ".2f"),
            _ends(part["sec"], ".2f", 1e3, " to "),
            number(part["share"]["value"], ".1%"),
        ]
        for part in parts
    ]
    header = ["part", "ms", "95 % interval", "share"]
    table = Table("Where the time of a step goes", header, "lrrr", rows)
    note = (
        "Found by leaving one part out at a time; the parts add up to the step. Everything else is"
        " what is left: contention, waiting."
    )
    return Figure("Where the time of a step goes", [chart], [], [table], note)


def _step_profile(profile: dict) -> Table:
    rows = [
        [f"shard {r}", whole(shard), number(loss, ".4f"), number(norm, ".4g")]
        for r, (shard, loss, norm) in enumerate(
            zip(profile["shards"], profile["losses"], profile["norms"], strict=True)
        )
    ]
    total = sum(profile["losses"])
    rows.append(
        ["the sum", whole(sum(profile["shards"])), number(total, ".4f"),
         number(profile["sum_norm"], ".4g")]
    )  # fmt: skip
    header = ["", "examples", "part of the mean loss", "norm of the gradient"]
    return Table("The first step, with its numbers", header, "lrrr", rows)


def _all_reduce(found: dict, facts: dict) -> Table:
    rows = [
        [str(n), whole(time["size_bytes"]), number(1e3 * time["sec"], ".3f")]
        for n, time in found["gradient_all_reduce"].items()
    ]
    caption = f"The all-reduce alone: {facts['all_reduce']}, without computation"
    return Table(caption, ["devices", "bytes of each", "ms"], "lrr", rows)


def _predictions(found: dict, facts: dict) -> Table:
    batch, rows = facts["global_batch_size"], []
    for p in found["predictions"]:
        if facts["simulated_devices"] and p["measured_sec"] is None:
            continue  # More logical devices on the same cores predict nothing.
        measured, error, how = "not measured", "–", ""
        if p["measured_sec"] is not None:
            measured = number(batch / p["measured_sec"])
            error = number(p["predicted_sec"] / p["measured_sec"] - 1, "+.1%")
            how = "held out" if p["held_out"] else "in the fit"
        predicted = number(batch / p["predicted_sec"])
        rows.append([whole(p["num_replicas"]), predicted, measured, error, how])
    header = ["devices", "predicted", "measured", "error of step time", "measurement was"]
    cores = " on the same cores" if facts["simulated_devices"] else ""
    return Table(f"Images a second with more devices{cores}", header, "lrrrl", rows)


def _what_follows(found: dict, facts: dict) -> str:
    text = f"Speed-up over one device alone: {_interval(found['speed_up'], 1, '.3g')}"
    batch = found["break_even_batch"]
    if facts["simulated_devices"]:
        return f"{text}. A break-even batch is not predicted from devices that share the cores."
    if batch is None:
        return f"{text}. The time of a step does not depend on the batch: no break-even."
    return f"{text}. Two devices beat one alone from a global batch of {number(batch)} on."


def _three(values: dict) -> tuple[float, float, float]:
    return values["value"], values["low"], values["high"]


def _caveats(facts: Sequence[dict]) -> list[str]:
    caveats = [
        DATASET_CAVEATS[d]
        for d in dict.fromkeys(f["dataset"] for f in facts)
        if d in DATASET_CAVEATS
    ]
    simulated = any(each["simulated_devices"] for each in facts)
    return [*caveats, TIMING_CAVEAT] if simulated else caveats


def _environment(found: dict, facts: Sequence[dict]) -> dict[str, str]:
    devices = dict.fromkeys(devices_text(f["devices"], f["simulated_devices"]) for f in facts)
    threads = dict.fromkeys(str(f["intra_op_threads"] or "TensorFlow's choice") for f in facts)
    return {
        "devices": ", ".join(devices),
        "threads of an operation": ", ".join(threads),
        **{str(name): str(version) for name, version in facts[0]["versions"].items()},
        "images": dataset_title(facts[0]["dataset"]),
        "processor": str(found["machine"]["processor"]),
    }
