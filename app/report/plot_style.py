"""Defines the style of figures: curves, titles and output files.

Colours are those of Okabe and Ito, which the colour-blind can tell apart; every curve has a line
style and a marker too, so that curves can be distinguished in grey and where they coincide.
"""

import dataclasses
import io
import pathlib
import warnings
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from app.records.files import write_file

STYLE: Any = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "0.9",
    "figure.titlesize": 11,
    "text.parse_math": False,  # A `$` in a user's name is not a formula.
    "svg.hashsalt": "lockstep",  # The same figure, the same file.
}


@dataclasses.dataclass(frozen=True)
class Look:
    """The colour, line style, marker and line width of a curve."""

    colour: str
    line: str
    marker: str
    width: float


# From wide and below to narrow and above: of curves that coincide all remain visible.
LOOKS = (
    Look("#0072B2", "-", "o", 4.5),
    Look("#E69F00", "-", "s", 2.2),
    Look("#000000", ":", "^", 1.4),
    Look("#CC79A7", "--", "D", 1.2),
    Look("#009E73", "-.", "v", 1.2),
    Look("#56B4E9", "--", "P", 1.2),
    Look("#D55E00", ":", "X", 1.2),
    Look("#0072B2", "--", "<", 1.0),
    Look("#E69F00", ":", ">", 1.0),
    Look("#000000", "-.", "*", 1.0),
)


def set_title(figure: Figure, text: str) -> None:
    """Writes a title of one or several lines, beginning at the left."""
    figure.suptitle(text, x=0.02, ha="left", linespacing=1.4)


def save_figure(figure: Figure, out_dir: pathlib.Path, name: str) -> None:
    """Saves a figure as PNG and SVG, atomically."""
    for suffix in ("png", "svg"):
        # Rendered in memory first: matplotlib does not report a full disk.
        write_file(out_dir / f"{name}.{suffix}", render(figure, suffix))


def render(figure: Figure, suffix: str) -> bytes:
    """Returns the content of a file with a figure."""
    content = io.BytesIO()
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # Of a user's names.
        metadata = {"Date": None} if suffix == "svg" else None
        figure.savefig(content, format=suffix, dpi=150, metadata=metadata)
    figure.set_layout_engine("none")  # Already laid out; do not repeat it for the next format.
    return content.getvalue()
