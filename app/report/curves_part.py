"""Builds the curves of a report: accuracy, loss and metrics over the epochs."""

from collections.abc import Sequence

from app.records.event_reader import middle_steps
from app.records.history import EpochRecord
from app.report.charts import Figure, Look, line_chart
from app.report.page_parts import Table, Text, number
from app.report.runs_part import Run

_CURVES = {
    "test_accuracy": ("test accuracy", ".2f", 1.0),
    "train_accuracy": ("train accuracy", ".2f", 1.0),
    "test_loss": ("test loss", ".3g", float("inf")),
    "train_loss": ("train loss", ".3g", float("inf")),
}


def curves(runs: Sequence[Run]) -> list:
    """Returns figures with accuracy and loss over epochs, or over steps, and their numbers."""
    over_steps = [run for run in runs if run.steps]
    drawn = [run for run in runs if run.history and not run.steps]
    blocks: list = [
        Text(f"{run.label}: no epoch is finished, so there is nothing to draw yet.")
        for run in runs
        if not run.history
    ]
    if over_steps:
        blocks.append(_curves_over_steps(over_steps))
    if not drawn:
        return blocks
    shown = _drawn_curves(drawn)
    charts = [
        line_chart(
            title,
            {run.label: [(r.epoch, _value(r, field)) for r in run.history] for run in drawn},
            x_label="epoch",
            form=form,
            most=most,
            least_span=0.1,
        )
        for field, (title, form, most) in shown.items()
    ]
    rows = [
        [run.label, str(r.epoch), *(number(_value(r, field), ".4f") for field in shown)]
        for run in drawn
        for r in run.history
    ]
    table = Table(
        "Accuracy and loss after each epoch",
        ["run", "epoch", *(title for title, *_ in shown.values())],
        "l" + "r" * (1 + len(shown)),
        rows,
    )
    legend = [(Look.of(index), run.label) for index, run in enumerate(drawn)]
    note = "Training values are means over the epoch, test values are those after it."
    title = "Accuracy and loss over the epochs"
    return [*blocks, Figure(title, charts, legend, [table], note)]


def _curves_over_steps(runs: Sequence[Run]) -> Figure:
    """Returns a figure of runs of one epoch, which would be one point over the epochs."""
    tags = {"steps/loss": ("training loss", ".3g"), "steps/accuracy": ("training accuracy", ".2f")}
    series = {
        tag: {
            run.label: [
                (round(step), point.values.get(tag))
                for step, point in zip(middle_steps(run.steps), run.steps, strict=True)
            ]
            for run in runs
            if any(tag in point.values for point in run.steps)
        }
        for tag in tags
    }
    charts = [
        line_chart(title, series[tag], x_label="step", form=form)
        for tag, (title, form) in tags.items()
        if series[tag]
    ]
    rows = [
        [run.label, str(point.step), *(number(point.values.get(tag), ".4f") for tag in tags)]
        for run in runs
        for point in run.steps
    ]
    header = ["run", "up to step", *(title for title, _ in tags.values())]
    table = Table("Means over the steps of each compiled call", header, "lrrr", rows)
    legend = [(Look.of(index), run.label) for index, run in enumerate(runs)]
    note = "Means over the steps of a compiled call. Test accuracies are in the table of results."
    return Figure("Loss and accuracy over the steps, one epoch", charts, legend, [table], note)


def _drawn_curves(runs: Sequence[Run]) -> dict[str, tuple[str, str, float]]:
    """Returns the curves of `_CURVES` and metrics of cases that at least one run has."""
    records = [record for run in runs for record in run.history]
    shown = {
        field: curve for field, curve in _CURVES.items()
        if any(_value(record, field) is not None for record in records)
    }  # fmt: skip
    # Metrics equal to `test_accuracy` are omitted.
    metrics = {
        name for record in records for name, value in record.test_metrics.items()
        if value != record.test_accuracy
    }  # fmt: skip
    return shown | {name: (f"test {name}", ".3g", float("inf")) for name in sorted(metrics)}


def _value(record: EpochRecord, field: str) -> float | None:
    """Returns the value of a field of `_CURVES` or of a metric."""
    return getattr(record, field) if field in _CURVES else record.test_metrics.get(field)
