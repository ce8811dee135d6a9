"""Writes `docs/same_curve.svg` and `.png`: a right and a wrong training, and the verdicts on them.

    python docs/same_curve.py    some minutes on two cores; needs Fashion-MNIST

Four trainings are run, a right and a wrong one and the right one with two other seeds, then five
steps of the first two are verified. All numbers of the figure are read from their files.
"""

import argparse
import dataclasses
import json
import pathlib
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.report.plot_style import STYLE, save_figure
from lockstep.answer.verdict import STAGES

# Two devices of unequal speed: of each batch, one trains on 192 examples and the other on 64.
_COMMON = ("--num_devices=2", "--shard_weights=3,1", "--recipe=fast")
_TRAIN = (*_COMMON, "--epochs=8", "--num_train_examples=20000", "--verify_every=0")
_VERIFY = ("verify", *_COMMON, "--strategies=manual", "--steps=5")
_FAULT = "--inject=mean_of_means"
_OTHER_SEEDS = (1, 2)
_RIGHT, _WRONG, _QUIET = "#009E73", "#D55E00", "0.6"
_RIGHT_TEXT, _WRONG_TEXT = "#00664B", "#A84800"  # Darker: text is thin.
_ROOM = 62  # Points above the panels, for texts.
_TEXT = 11  # Points: about 12 pixels where the figure is 800 pixels wide.
_EQUAL, _LOWEST, _HIGHEST = 1e-4, 1e-5, 1e8  # Of the axis; equal arrays are drawn at the first.


@dataclasses.dataclass(frozen=True)
class Curve:
    """The results of a training: its mean loss in each epoch, and its last test accuracy."""

    losses: list[float]
    accuracy: float


def train(out: pathlib.Path, *more: str) -> Curve:
    """Trains, without verification; returns the curve.

    Args:
        out: the run directory.
        more: further options.
    """
    _run([*_TRAIN, *more], out, expected=0)
    epochs = [json.loads(line) for line in (out / "history.jsonl").read_text("utf-8").splitlines()]
    return Curve([epoch["train_loss"] for epoch in epochs], epochs[-1]["test_accuracy"])


def verify(out: pathlib.Path, *more: str) -> dict[str, Any]:
    """Verifies five steps of a training; returns what `verify.json` has about it."""
    _run([*_VERIFY, *more], out, expected=9 if more else 0)
    return json.loads((out / "verify.json").read_text("utf-8"))["trainings"]["manual"]


def _run(words: Sequence[str], out: pathlib.Path, expected: int) -> None:
    """Runs the program.

    Raises:
        subprocess.CalledProcessError: it ended with another exit code.
    """
    print(f"running main.py {' '.join(words)}", flush=True)
    command = [sys.executable, str(ROOT / "main.py"), *words, f"--out={out}"]
    result = subprocess.run(
        command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if "GENERATED images" in result.stdout:
        sys.exit("error: Fashion-MNIST was not found; set FASHION_MNIST_DIR")
    if result.returncode != expected:
        raise subprocess.CalledProcessError(result.returncode, command, result.stdout)


@matplotlib.rc_context({**STYLE, "font.size": _TEXT})
def draw(
    right: Curve,
    wrong: Curve,
    others: Sequence[Curve],
    right_verdict: dict[str, Any],
    wrong_verdict: dict[str, Any],
) -> Figure:
    """Draws the curves at the left, the verdicts at the right.

    Args:
        right, wrong: the two trainings.
        others: the right training with other seeds.
        right_verdict, wrong_verdict: what `verify.json` has about the two.
    """
    figure = Figure(figsize=(10, 5.2), layout="constrained")
    curves, distances = figure.subplots(1, 2, width_ratios=[0.8, 1])
    _draw_curves(curves, right, wrong, others)
    _draw_distances(distances, right_verdict, _RIGHT, {"marker": "o", "markersize": 13})
    worst = _draw_distances(distances, wrong_verdict, _WRONG, {"marker": "s", "markersize": 6})
    stage = wrong_verdict["findings"][0]["stage"]
    times = f"{float(f'{worst[stage]:.2g}'):,.0f} times"
    distances.annotate(
        f"{times}\nwhat rounding allows", (stage, worst[stage]), (-12, 0),
        textcoords="offset points", ha="right", va="center", color=_WRONG_TEXT,
    )  # fmt: skip
    _scale(distances)
    _write_verdicts(distances, right_verdict, wrong_verdict)
    figure.supxlabel(
        "LeNet on Fashion-MNIST, two devices with 192 and 64 examples of each batch of 256."
        f"\nThe wrong {stage}: {wrong_verdict['findings'][0]['text']}."
        f"\nLater stages are compared given what they got: they are right for the wrong {stage}.",
        fontsize=10, color="0.25", ha="left", x=0.01, linespacing=1.3,
    )  # fmt: skip
    return figure


def _draw_curves(axes: Axes, right: Curve, wrong: Curve, others: Sequence[Curve]) -> None:
    epochs = range(1, len(right.losses) + 1)
    for name, curve, look in (
        ("right", right, {"color": _RIGHT, "linestyle": "-", "marker": "o", "markersize": 8}),
        ("wrong", wrong, {"color": _WRONG, "linestyle": "--", "marker": "s"}),
    ):
        label = f"{name}: test accuracy {curve.accuracy:.1%}"
        axes.plot(epochs, curve.losses, **look, linewidth=2.2, label=label)
    for number, other in enumerate(others):
        label = f"right, other seeds: {', '.join(f'{each.accuracy:.1%}' for each in others)}"
        look = {"color": _QUIET, "zorder": 1, "label": "" if number else label}
        axes.plot(epochs, other.losses, ":", **look, linewidth=1.6)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epoch")
    axes.set_ylabel("training loss")
    axes.grid()
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(-0.01, 1.0), borderpad=0.1)
    axes.set_title("The loss curves look alike", loc="left", weight="bold", pad=_ROOM)


def _draw_distances(
    axes: Axes, verdict: dict[str, Any], colour: str, look: dict[str, Any]
) -> dict[str, float]:
    """Draws the largest difference of each stage over all steps; returns stage → difference."""
    measured, shares = verdict["measurements"], dict[str, list[float]]()
    columns = (measured[name] for name in ("stage", "distance", "allowed", "same_bits"))
    for stage, distance, allowed, same in zip(*columns, strict=True):
        shares.setdefault(stage, []).append(_EQUAL if same else distance / allowed)
    stages = [stage for stage in STAGES if stage in shares]
    worst = [max(shares[stage]) for stage in stages]
    axes.plot(stages, worst, "-", color=colour, linewidth=2)
    for stage, share in zip(stages, worst, strict=True):
        fill = "white" if share == _EQUAL else colour
        axes.plot(stage, share, color=colour, markerfacecolor=fill, markeredgewidth=1.8, **look)
    axes.set_xlim(-0.35, len(stages) - 0.6)
    return dict(zip(stages, worst, strict=True))


def _scale(axes: Axes) -> None:
    axes.set_yscale("log")
    axes.set_ylim(_LOWEST, _HIGHEST)
    axes.axhspan(_LOWEST, 1, color="0.93", linewidth=0, zorder=0)
    axes.minorticks_off()
    axes.set_yticks(
        [_EQUAL, 1e-2, 1, 1e2, 1e4, 1e6],
        ["bitwise\nequal", "0.01", "1", "100", "10,000", "1,000,000"],
    )
    axes.text(
        0.01, 0.8, "what rounding allows", transform=axes.get_yaxis_transform(), va="top",
        color="0.35",
    )  # fmt: skip
    axes.set_xlabel("stage of a training step")
    axes.set_ylabel("difference from one device / allowed")
    axes.grid(axis="y")


def _write_verdicts(
    axes: Axes, right_verdict: dict[str, Any], wrong_verdict: dict[str, Any]
) -> None:
    """Writes the verdicts above the panel, and what is wrong where it is drawn."""
    wrong = wrong_verdict["findings"][0]
    bits = ", bit for bit" if right_verdict["sentence"].endswith("bit for bit") else ""
    where = ", ".join((wrong["steps"][0], wrong["stage"], wrong["tensors"][0], wrong["items"][0]))
    lines = {
        f"\N{CHECK MARK} right is the {right_verdict['reference']}{bits}": _RIGHT_TEXT,
        f"\N{BALLOT X} wrong is not: {wrong['title']}": _WRONG_TEXT,
        f"    first in {where}": _WRONG_TEXT,
    }
    for number, (text, colour) in enumerate(lines.items()):
        axes.annotate(
            text, (0, 1), (0, _ROOM - 14 - 17 * number), xycoords="axes fraction",
            textcoords="offset points", color=colour, va="center",
        )  # fmt: skip
    axes.set_title("The verdict tells them apart", loc="left", weight="bold", pad=_ROOM)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the trainings and verifications, and writes the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "docs", help="output directory")
    out = parser.parse_args(arguments).out
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder)
        figure = draw(
            train(path / "right"),
            train(path / "wrong", _FAULT),
            [train(path / f"seed-{seed}", f"--seed={seed}") for seed in _OTHER_SEEDS],
            verify(path / "right-verified"),
            verify(path / "wrong-verified", _FAULT),
        )
    save_figure(figure, out, "same_curve")


if __name__ == "__main__":
    main()
