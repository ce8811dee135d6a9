"""Prints what devices of a split training send and hold, and how long they wait."""

from app.config import ExplainConfig
from app.performance.breakdown_output import print_parts
from app.performance.case import Facts
from app.performance.split_breakdown import SplitBreakdown
from app.performance.split_records import HeldState, PipelineProfile, TimedSteps, Traffic
from app.runtime import console

_METHODS = {
    "compute": "one device alone, the whole batch",
    "input": "the step, less one on a fixed batch",
    "everything else": "what is left: sending, waiting, splitting",
}


def print_traffic(traffic: Traffic) -> None:
    """Prints the bytes sent between devices, by formula and counted in the graph."""
    console.say()
    rows = [[name, formula, f"{size:,}", ""] for name, formula, size in traffic.terms]
    total = [_bytes(traffic.formula_bytes), _bytes(traffic.counted_bytes)]
    rows.append(["in all, between devices", "", *total])
    rows.append(["images, labels and numbers", "", "", _bytes(traffic.input_bytes)])
    console.print_table(
        "bytes between devices in a step: by formula, and counted in the traced graph",
        ["what travels", "", "by formula", "counted"],
        rows,
    )
    if traffic.note:
        console.say(traffic.note)
    elif traffic.links:
        console.say(verdict_of(traffic))


def verdict_of(traffic: Traffic) -> str:
    """Returns in words whether formula and count agree on every connection."""
    apart = [link for link in traffic.links if link[2] != link[3]]
    if apart:
        sender, receiver, formula, counted = apart[0]
        return (
            f"counted and formula DIFFER on {console.count(len(apart), 'connection')}: device"
            f" {sender} sends device {receiver} {counted:,} bytes, {formula:,} by formula"
        )
    sender, receiver, _, most = max(traffic.links, key=lambda link: link[3])
    number = console.count(len(traffic.links), "connection")
    return (
        f"equal on each of {number}; the busiest is that from device {sender} to device {receiver},"
        f" with {most:,} bytes"
    )


def _bytes(size: int | None) -> str:
    return "–" if size is None else f"{size:,}"


def print_held(held: list[HeldState]) -> None:
    """Prints what each device holds between steps."""
    console.say()
    console.print_table(
        "bytes that a device holds between steps",
        ["device", "weights", "optimizer state", "BatchNorm statistics"],
        [
            [
                state.device.removeprefix("/device:"),
                f"{state.weights_bytes:,}",
                f"{state.optimizer_bytes:,}",
                f"{state.statistics_bytes:,}",
            ]
            for state in held
        ],
    )


def print_pipeline(pipeline: PipelineProfile) -> None:
    """Prints the stages, the schedule as text, and the idle time."""
    console.say()
    console.print_table(
        f"{console.count(pipeline.num_stages, 'stage')},"
        f" M = {pipeline.num_micro_batches} micro-batches, schedule {pipeline.schedule}",
        ["stage", "layers", "operations", "forward ms", "backward ms", "in flight", "by schedule"],
        _stage_rows(pipeline),
    )
    for line in schedule_lines(pipeline):
        console.say(f"  {line}")
    console.say("  F forward, B backward, with the number of the micro-batch; a dot is idle time")
    rows = [
        ["stages that take equally long: (K − 1) / (M + K − 1)", f"{pipeline.bubble:.3f}"],
        ["by the schedule, from the times above", f"{pipeline.simulated_idle:.3f}"],
        ["measured", _idle(pipeline.measured)],
    ]
    if pipeline.padded:
        rows.append(["measured, every task padded by sleeping", _idle(pipeline.padded)])
    console.say()
    console.print_table("share of the time in which stages are idle", ["", "share"], rows)


def _stage_rows(pipeline: PipelineProfile) -> list[list[str]]:
    means = {
        (stage, is_forward): [
            1e3 * (task.end_sec - task.start_sec)
            for task in pipeline.measured.tasks
            if (task.stage, task.is_forward) == (stage, is_forward)
        ]
        for stage in range(pipeline.num_stages)
        for is_forward in (True, False)
    }
    return [
        [
            str(k),
            first if first == last else f"{first} … {last}",
            f"{share:.0%}",
            *(f"{sum(means[k, way]) / len(means[k, way]):.2f}" for way in (True, False)),
            str(pipeline.measured.in_flight[k]),
            str(pipeline.in_flight[k]),
        ]
        for k, (first, last, share) in enumerate(pipeline.stages)
    ]


def schedule_lines(pipeline: PipelineProfile) -> list[str]:
    """Returns one line per stage, with one column per time slot."""
    width = 1 + len(str(pipeline.num_micro_batches - 1))
    lines = []
    for stage in range(pipeline.num_stages):
        cells = []
        for slot in pipeline.slots:
            own = [f"{'FB'[not forward]}{m}" for k, forward, m in slot if k == stage]
            cells.append((own[0] if own else ".").ljust(width))
        lines.append(f"stage {stage}  {' '.join(cells)}".rstrip())
    return lines


def _idle(timed: TimedSteps) -> str:
    return f"{timed.idle:.3f} ({min(timed.idle_shares):.3f}–{max(timed.idle_shares):.3f})"


def print_split_breakdown(config: ExplainConfig, breakdown: SplitBreakdown, facts: Facts) -> None:
    """Prints the step-time breakdown, and the throughput for each number of devices."""
    print_parts(config, facts, breakdown, _METHODS)
    console.say()
    shares = " on the same cores" if facts.simulated_devices else ""
    console.print_table(
        f"images/s with more devices{shares}, batch {facts.global_batch_size}",
        ["devices", "images/s", "95 % interval"],
        [
            [f"{n}{' (single)' * (n == 1)}", f"{r.value:,.0f}", f"{r.low:,.0f}–{r.high:,.0f}"]
            for n, r in breakdown.images_per_sec.items()
        ],
    )
    console.say(
        f"{console.count(facts.num_devices, 'device')} against one of them with the same batch:"
        f" speed-up {breakdown.speed_up}"
    )
