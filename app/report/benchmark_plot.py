"""Draws the two figures of a benchmark from `benchmark.json`."""

import pathlib

from matplotlib.figure import Figure

from app.records.caveats import dataset_title
from app.records.files import read_json
from app.report.charts import draw_bars
from app.report.plot_style import save_figure

_COLOURS = {"single": "#000000", "manual": "#0072B2", "mirrored": "#E69F00"}
_MARKERS = {"single": "^", "manual": "o", "mirrored": "s"}
_LINES = {"float32": "-", "mixed_bfloat16": "--", "mixed_float16": ":"}


def plot_benchmark(path: pathlib.Path, out_dir: pathlib.Path) -> list[str]:
    """Draws throughput, and speed-up against the ideal, into `out_dir`, as PNG and SVG.

    Args:
        path: `benchmark.json`.
        out_dir: output directory.

    Returns:
        The names of the files.
    """
    record = read_json(path)
    names = ["throughput"]
    save_figure(_draw_throughput(record), out_dir, "throughput")
    scaling = [c for c in record["comparisons"] if c["axis"].endswith("scaling") and c["speed_up"]]
    if scaling:
        save_figure(_draw_speed_up(record, scaling), out_dir, "speedup")
        names.append("speedup")
    return [f"{name}.{suffix}" for name in names for suffix in ("png", "svg")]


def _draw_throughput(record: dict) -> Figure:
    cases = record["cases"]
    figure = Figure(figsize=(8.5, 1.6 + 0.36 * len(cases)), layout="constrained")
    axes = figure.subplots()
    rates = [case["images_per_sec"] for case in cases]
    rows = [(rate["value"], rate["low"], rate["high"]) for rate in rates]
    draw_bars(axes, rows, [_colour(case) for case in cases], height=0.8)
    axes.set_yticks(range(len(cases)), [case["short_name"] for case in cases])
    axes.invert_yaxis()
    axes.set_xlabel("images per second, median with 95 % interval")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(record), fontsize=11, ha="left", x=0.02)
    return figure


def _draw_speed_up(record: dict, scaling: list[dict]) -> Figure:
    cases = {case["name"]: case for case in record["cases"]}
    kinds = list(dict.fromkeys(comparison["axis"] for comparison in scaling))
    figure = Figure(figsize=(5.2 * len(kinds) + 0.6, 4.4), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        curves: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
        for comparison in scaling:
            if comparison["axis"] == kind:
                case, base = cases[comparison["case"]], cases[comparison["base"]]
                size = case["global_batch_size"]
                batch = f"{size // len(case['devices'])} each" if kind[0] == "w" else f"{size}"
                key = (case["strategy"], case["model"], case["precision"], batch)
                curve = curves.setdefault(key, [(len(base["devices"]), 1.0, 1.0, 1.0)])
                speed = comparison["speed_up"]
                curve.append((len(case["devices"]), speed["value"], speed["low"], speed["high"]))
        counts = sorted({count for curve in curves.values() for count, *_ in curve})
        simulated = all(c["ideal"] == 1 for c in scaling)
        ideal = [1 if simulated else count / counts[0] for count in counts]
        label = "ideal on one processor" if simulated else "ideal"
        axes.plot(counts, ideal, color="0.6", linestyle="--", linewidth=1, label=label)
        for (strategy, model, precision, batch), curve in curves.items():
            xs, values, lows, highs = zip(*sorted(curve), strict=True)
            axes.errorbar(
                xs,
                values,
                yerr=[
                    [v - low for v, low in zip(values, lows, strict=True)],
                    [high - v for v, high in zip(values, highs, strict=True)],
                ],
                color=_COLOURS.get(strategy, "#CC79A7"),
                marker=_MARKERS.get(strategy, "D"),
                linestyle=_LINES[precision],
                capsize=3,
                label=", ".join(
                    [strategy, f"batch {batch}"]
                    + [part for part in (model, precision) if part not in record["common"]]
                ),
            )
        axes.set_title(kind, fontsize=10)
        axes.set_xticks(counts)
        axes.set_xlabel("devices")
        axes.set_ylabel("speed-up in images per second")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(fontsize=8)
    figure.suptitle(_title(record), fontsize=11, ha="left", x=0.02)
    return figure


def _colour(case: dict) -> str:
    return _COLOURS.get(case["strategy"], "#CC79A7")


def _title(record: dict) -> str:
    dataset = record["cases"][0]["dataset"]
    title = f"{record['common']}; {dataset_title(dataset)}"
    title += f" on {record['machine']['processor']}"
    if any(case["simulated_devices"] for case in record["cases"]):
        title += "\nsimulated devices share its cores: timing is not scaling"
    return title
