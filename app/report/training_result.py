"""Describes finished and unfinished trainings: the table of results, caveats and settings."""

from collections.abc import Mapping, Sequence

from app.records.caveats import DATASET_CAVEATS, TIMING_CAVEAT, injected_fault_caveat
from app.records.history import Summary
from app.report.result import Block, Result, Table
from lockstep.answer.html import BAD


def devices_text(devices: Sequence[str], simulated: bool) -> str:
    """Returns "1 CPU", "2 simulated CPUs", "4 GPUs"."""
    kind = "GPU" if devices and "GPU" in devices[0] else "CPU"
    plural = "s" if len(devices) > 1 else ""
    return f"{len(devices)} {'simulated ' if simulated else ''}{kind}{plural}"


def results_table(title: str, summaries: Mapping[str, Summary], first: str = "strategy") -> Table:
    """Returns a row for each training; with the speed-up over `single`, on real devices.

    Args:
        title: title of the table.
        summaries: name of the training → its summary.
        first: header of the names.
    """
    single = next((s for s in summaries.values() if s.strategy == "single"), None)
    header = [first, "devices", "test acc", "sec/epoch", "images/s"]
    rows = [
        [
            name,
            f"{len(s.devices)} simulated" if s.simulated_devices else str(len(s.devices)),
            f"{s.test_accuracy:.4f}",
            f"{s.epoch_sec:.2f}",
            f"{s.images_per_sec:,.0f}",
        ]
        for name, s in summaries.items()
    ]
    if single and not any(s.simulated_devices for s in summaries.values()):
        header.append("speed-up")
        for row, s in zip(rows, summaries.values(), strict=True):
            row.append(f"{single.epoch_sec / s.epoch_sec:.2f}x")
    return Table(title, header, rows)


def describe_trainings(summaries: Mapping[str, Summary | None]) -> Result:
    """Describes trainings by their summaries, None for one without a finished epoch."""
    known = {name: summary for name, summary in summaries.items() if summary}
    verdicts, blocks, same = [], list[Block](), dict[str, list[str]]()
    if known:
        blocks.append(results_table("", known, "run"))
    for name, summary in summaries.items():
        if summary is None:
            blocks.append(f"{name}: no epoch is finished yet")
            continue
        if summary.status != "finished":
            done = summary.steps * summary.global_batch_size / summary.num_train_examples
            blocks.append(f"{name}: not finished, about {done:.0f} of {summary.epochs} epochs")
        if summary.verified_steps:
            blocks.append(f"{name}: {summary.verified_line()}")
        if summary.mismatches:
            verdicts.append((BAD, f"{name}: a verified step does not match its reference"))
        blocks += [f"{name}: changed on the way: {change}" for change in summary.changes]
        same.setdefault(summary.weights_sha256, []).append(name)
    blocks += [
        f"bitwise identical weights: {', '.join(names)}" for names in same.values() if names[1:]
    ]
    return Result(verdicts, blocks)


def caveats_of(summary: Summary) -> list[str]:
    """Returns the caveats that are shown with every result of a training."""
    caveats = [injected_fault_caveat(summary.injected_fault)] if summary.injected_fault else []
    if summary.dataset in DATASET_CAVEATS:
        caveats.append(DATASET_CAVEATS[summary.dataset])
    return [*caveats, TIMING_CAVEAT] if summary.simulated_devices else caveats


def settings_table(settings: Mapping[str, Mapping[str, object]]) -> Table:
    """Returns a row for each setting of several records, those that differ first, marked."""
    names = dict.fromkeys(name for each in settings.values() for name in each)
    rows = [[name, *(_shown(each.get(name)) for each in settings.values())] for name in names]
    for row in rows:
        if len(set(row[1:])) > 1:
            row[0] = f"≠ {row[0]}"
    rows.sort(key=lambda row: not row[0].startswith("≠"))
    return Table("", ["setting", *settings], rows)


def _shown(value: object) -> str:
    if value is None:
        return "–"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
