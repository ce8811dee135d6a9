"""Builds the part of a report about a split training: traffic, memory and idle time."""

from app.report.charts import Figure, bar_chart
from app.report.page_parts import Table, Text, number, whole
from app.report.schedule_chart import passes_in_slots, passes_in_time, schedule_chart


def split_blocks(split: dict) -> list:
    """Returns the blocks for the "split" of `explain.json`."""
    pipeline = split["pipeline"]
    blocks = _schedule(pipeline) if pipeline else []
    return [*blocks, *_traffic(split["traffic"]), _held(split["held"])]


def throughput(found: dict, *, simulated: bool) -> Figure:
    """Returns a figure with the throughput for each number of devices."""
    rates = found["images_per_sec"]
    rows = [
        (f"{n} (single)" if n == "1" else n, *(rate[end] for end in ("value", "low", "high")))
        for n, rate in rates.items()
    ]
    chart = bar_chart("images a second", rows, form=",.0f", unit="")
    numbers = [[name, *(number(value) for value in values)] for name, *values in rows]
    table = Table("Images a second", ["devices", "images/s", "from", "to"], "lrrr", numbers)
    cores = " on the same cores" if simulated else ""
    return Figure(f"Images a second with more devices{cores}", [chart], [], [table])


def _schedule(pipeline: dict) -> list:
    stages, measured, padded = pipeline["stages"], pipeline["measured"], pipeline["padded"]
    charts = [
        schedule_chart("by the schedule", passes_in_slots(pipeline["slots"]), len(stages), "slot")
    ]
    idle = [["stages that take equally long: (K − 1) / (M + K − 1)", _share(pipeline["bubble"])]]
    idle.append(["by the schedule, from the measured times", _share(pipeline["simulated_idle"])])
    for title, timed in (("measured, padded alike", padded), ("measured", measured)):
        if timed:
            passes = passes_in_time(timed["tasks"])
            charts.append(schedule_chart(title, passes, len(stages), "ms"))
            idle.append([title, ", ".join(_share(value) for value in timed["idle_shares"])])
    rows = [
        [f"stage {k}", f"{first} to {last}", number(share, ".0%"), whole(alive), whole(theory)]
        for k, ((first, last, share), alive, theory) in enumerate(
            zip(stages, measured["in_flight"], pipeline["in_flight"], strict=True)
        )
    ]
    header = ["", "layers", "operations", "micro-batches in flight", "by the schedule"]
    tables = [
        Table("Share of the time in which stages are idle", ["", "share"], "lr", idle),
        Table("The stages", header, "llrrr", rows),
    ]
    title = (
        f"{len(stages)} stages, {pipeline['num_micro_batches']} micro-batches, schedule"
        f" {pipeline['schedule']}"
    )
    note = (
        "A box is a pass of a micro-batch through a stage, with its number: forward in blue,"
        " backward in orange. What is grey is idle time. Padded stages sleep in every pass, so"
        " that they take equally long and do not compete for a processor."
    )
    return [Figure(title, charts, [], tables, note)]


def _share(value: float) -> str:
    return number(value, ".3f")


def _traffic(traffic: dict) -> list:
    rows = [[name, formula, whole(size), ""] for name, formula, size in traffic["terms"]]
    rows.append(
        ["in all, between devices", "", whole(traffic["formula_bytes"]),
         whole(traffic["counted_bytes"])]
    )  # fmt: skip
    rows.append(["images, labels and numbers", "", "", whole(traffic["input_bytes"])])
    header = ["what travels", "formula", "bytes by formula", "counted in the graph"]
    table = Table("Bytes between devices in a step", header, "llrr", rows)
    return [table, *([Text(str(traffic["note"]))] if traffic["note"] else [])]


def _held(held: list) -> Table:
    kinds = ("weights_bytes", "optimizer_bytes", "statistics_bytes")
    rows = [
        [str(state["device"]).removeprefix("/device:"), *(whole(state[kind]) for kind in kinds)]
        for state in held
    ]
    header = ["device", "weights", "optimizer state", "BatchNorm statistics"]
    return Table("Bytes that a device holds between steps", header, "lrrr", rows)
