"""Draws the accuracy of one or several runs over the epochs.

Colours are those of Okabe and Ito, which the colour-blind can tell apart; every curve has a line
style and a marker too, so that curves can be distinguished in grey and where they coincide.
"""

import io
import pathlib
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.records.files import write_file
from app.records.history import TIMING_CAVEAT, Run

if TYPE_CHECKING:  # Imported where a figure is drawn: it takes 0.3 s.
    from matplotlib.figure import Figure

DATASET_TITLES = {"fashion_mnist": "Fashion-MNIST", "synthetic": "GENERATED garments"}
_STYLE: Any = {
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "figure.titlesize": 11,
    "text.parse_math": False,  # A `$` in a user's name is not a formula.
    "svg.hashsalt": "lockstep",  # The same figure, the same file.
}
# Colour, line, marker and width, from wide below to narrow above: curves that coincide are visible.
_LOOKS = (
    ("#0072B2", "-", "o", 4.5),
    ("#E69F00", "-", "s", 2.2),
    ("#000000", ":", "^", 1.4),
    ("#CC79A7", "--", "D", 1.2),
    ("#009E73", "-.", "v", 1.2),
    ("#D55E00", ":", "X", 1.2),
)


def plot_accuracy(runs: Mapping[str, Run], out_dir: pathlib.Path) -> None:
    """Draws runs, by name, into `accuracy.png` and `accuracy.svg`; writes each atomically."""
    figure = draw_accuracy(runs)
    for suffix in ("png", "svg"):
        write_file(out_dir / f"accuracy.{suffix}", render(figure, suffix))


def render(figure: "Figure", suffix: str) -> bytes:
    """Returns the content of a file with a figure."""
    import matplotlib

    content = io.BytesIO()  # In a file, matplotlib does not report a full disk.
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # Of a user's names.
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(content, format=suffix, dpi=150, metadata=metadata)
    figure.set_layout_engine("none")  # Already laid out; do not repeat it for the next format.
    return content.getvalue()


def draw_accuracy(runs: Mapping[str, Run]) -> "Figure":
    """Draws test and train accuracies over the epochs, in two panels if there are several runs."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter

    test, train = {}, {}
    for name, (_, epochs) in runs.items():
        test[name] = [record.test_accuracy or 0.0 for record in epochs]
        train[name] = [record.train_accuracy for record in epochs]
    panels = {"test accuracy": test, "train accuracy, mean over the epoch": train}
    if len(runs) == 1:
        (own,), (mean,) = test.values(), train.values()
        panels = {"accuracy": {"test": own, "train, mean over the epoch": mean}}
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7 if len(runs) == 1 else 10, 4.8), layout="constrained")
        subplots = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
        for axes, (label, curves) in zip(subplots, panels.items(), strict=True):
            _draw_curves(axes, curves)
            axes.set(xlabel="epoch", ylabel=label)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.yaxis.set_major_locator(MaxNLocator(steps=[1, 2, 5, 10]))
        low, high = axes.get_ylim()
        room = max(0.01, (0.2 - (high - low)) / 2)  # At least 20 points: noise looks small.
        axes.set_ylim(max(0.0, low - room), min(1.0, high + room))
        title = _title([summary for summary, _ in runs.values()])
        figure.suptitle(title, x=0.02, ha="left", linespacing=1.4)
    return figure


def _draw_curves(axes: Any, curves: Mapping[str, Sequence[float]]) -> None:
    """Draws accuracies after each epoch, with the last one in the legend."""
    for index, (name, values) in enumerate(curves.items()):
        colour, line, marker, width = _LOOKS[index % len(_LOOKS)]
        axes.plot(
            range(1, len(values) + 1),
            values,
            line,
            color=colour,
            linewidth=width,
            marker=marker,
            markersize=3 + width,
            markerfacecolor="white" if line != "-" else colour,
            label=f"{name}: {values[-1]:.1%}",
        )
    axes.legend()


def _title(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Returns what is trained, and below which strategies on which devices."""
    kinds, places = dict[str, None](), dict[str, list[str]]()
    for s in summaries:
        fault = f"INJECTED FAULT: {s['injected_fault']}\n" if s["injected_fault"] else ""
        kind = (
            f"{fault}{s['model']} on {DATASET_TITLES.get(s['dataset'], s['dataset'])}"
            f" ({s['num_train_examples']:,} images), recipe {s['recipe']},"
            f" batch {s['global_batch_size']}, lr {s['learning_rate']:g}"
        )
        kinds[kind] = None
        device = "GPU" if "GPU" in s["devices"][0] else "CPU"
        where = f"{len(s['devices'])} {TIMING_CAVEAT if s['simulated_devices'] else device}"
        places.setdefault(where, []).append(s["strategy"])
    if len(kinds) > 1:  # The page has their settings.
        return "\n".join(kinds)
    return "\n".join([*kinds, *(f"{', '.join(names)} on {at}" for at, names in places.items())])
