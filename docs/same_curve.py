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

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

_COMMON = ("--device=cpu", "--num_gpus=2", "--recipe=fast")
_TRAIN = (*_COMMON, "--epochs=8", "--num_train_examples=20000")
_VERIFY = ("verify", *_COMMON, "--strategies=manual", "--steps=5")
# The first step of the warm-up has a learning rate of 0: its update shows no factor.
_FAULT = "--inject=scale_gradient:factor=1.5,step=2"
_OTHER_SEEDS = (1, 2)
_RIGHT, _WRONG, _QUIET = "#009E73", "#D55E00", "0.6"
_RIGHT_TEXT, _WRONG_TEXT = "#00664B", "#A84800"  # Darker: text is thin.
_ROOM = 62  # Points above the panels, for texts.
_STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "font.size": 11,  # Points: about 12 pixels where the figure is 800 pixels wide.
    "svg.hashsalt": "lockstep",  # The same figure, the same file.
}


@dataclasses.dataclass(frozen=True)
class Curve:
    """The results of a training: its mean loss in each epoch, and its last test accuracy."""

    losses: list[float]
    accuracy: float


def train(out: pathlib.Path, *more: str) -> Curve:
    """Trains; returns the curve.

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


@matplotlib.rc_context(_STYLE)
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
    figure = Figure(figsize=(10, 4.6), layout="constrained")
    curves, nodes = figure.subplots(1, 2, width_ratios=[0.9, 1])
    _draw_curves(curves, right, wrong, others)
    _draw_nodes(nodes, right_verdict, wrong_verdict)
    figure.supxlabel(
        "LeNet on Fashion-MNIST, two devices."
        f"\nThe wrong training: {[*wrong_verdict['formula'], wrong_verdict['reason']][0]}.",
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


def _draw_nodes(axes: Axes, right: dict[str, Any], wrong: dict[str, Any]) -> None:
    """Draws each compared node of a step, right or wrong, and writes the verdicts above."""
    first = wrong["place"]
    order = [*right["nodes"]]
    nodes = [node for node in order if right["nodes"][node] != "not measured"]
    nodes = sorted({*nodes, first["node"]}, key=order.index)
    is_right = ("\N{CHECK MARK}", _RIGHT)
    for row, node in enumerate(nodes):
        marks = [is_right, is_right if row < nodes.index(first["node"]) else ("–", _QUIET)]
        if node == first["node"]:
            marks[1] = ("\N{BALLOT X}", _WRONG)  # What is behind it, is not compared.
        for column, (mark, colour) in enumerate(marks):
            axes.text(column, row, mark, color=colour, ha="center", va="center", fontsize=15)
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylim(len(nodes) - 0.5, -0.5)
    axes.set_xticks([0, 1], ["right", "wrong"])
    axes.set_yticks(range(len(nodes)), nodes)
    axes.tick_params(length=0)
    place = ", ".join([first["step"], first["node"], *first["tensors"][:1]])
    lines = {
        f"\N{CHECK MARK} {right['sentence'].partition(':')[0]}": _RIGHT_TEXT,
        f"\N{BALLOT X} {wrong['sentence']}": _WRONG_TEXT,
        f"    first in {place}": _WRONG_TEXT,
    }
    for number, (text, colour) in enumerate(lines.items()):
        axes.annotate(
            text, (0, 1), (-60, _ROOM - 14 - 17 * number), xycoords="axes fraction", fontsize=10,
            textcoords="offset points", color=colour, va="center",
        )  # fmt: skip
    axes.set_title("The verdict tells them apart", loc="left", x=-0.15, weight="bold", pad=_ROOM)


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
    with matplotlib.rc_context(_STYLE):
        figure.savefig(out / "same_curve.svg", metadata={"Date": None})
        figure.savefig(out / "same_curve.png", dpi=150)


if __name__ == "__main__":
    main()
