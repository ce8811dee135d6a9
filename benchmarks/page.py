"""Writes the page of the benchmark: a table of ratios."""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from app.commands.benchmark import interval
from parts import OWN, PARTS, PEERS

FOLDER = pathlib.Path(__file__).parent


def render(results: dict[str, Any], before: str = "") -> str:
    """Returns the page: a table for each processor.

    Args:
        results: "machine", "command", "date" and "versions", "left_out", and in "parts" the times
            and accuracies of the programs.
        before: the page so far, of which the tables of other processors stay.
    """
    preamble = (FOLDER / "preamble.md").read_text(encoding="utf-8")
    versions = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    how = f"{results['date']}, `{results['command']}`, no GPU; {versions}."
    lines = [results["machine"], "", how, ""]
    lines += [*summary(results["parts"]), ""]
    lines += [f"Not measured: {reason}.\n" for reason in results["left_out"]]
    tested = [each["accuracy"] for part in results["parts"].values() for each in part.values()
              if "accuracy" in each]  # fmt: skip
    if tested:
        text = f"{min(tested):.4f} to {max(tested):.4f}"
        lines.append(f"Test accuracies after the epoch of recipe `fast`: {text}.\n")
    tables = before.split("\n## ")[1:]
    others = [table for table in tables if table.partition("\n")[0] != results["machine"]]
    return "\n## ".join([preamble, "\n".join(lines), *others])


def summary(measured: dict[str, Any]) -> list[str]:
    """Returns a table of this project against each peer's best, and the other ratios.

    A training's title is in the first of its rows.
    """
    lines = [
        "| Training | Program | Images/s | Over | Images/s | Ratio of times |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for part, programs in measured.items():
        title = PARTS[part].title
        for name, base in [*_against_best(programs), *PARTS[part].ratios]:
            if name in programs and base in programs:  # Some are left out.
                secs, of_base = programs[name]["secs"], programs[base]["secs"]
                ratio = interval(secs, of_base)
                low, high = ratio["low"], ratio["high"]
                lines.append(
                    f"| {title} | {name} | {_rate(secs)} | {base} | {_rate(of_base)} |"
                    f" {ratio['median']:.3f} ({low:.3f}–{high:.3f}) |"
                )
                title = ""
    return lines


def _rate(secs: Sequence[float]) -> str:
    """Returns the images per second of blocks with these seconds per image."""
    return f"{1 / np.median(secs):,.0f}"


def _against_best(programs: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yields `manual` in a precision and the fastest program of each peer.

    Keras with the variable is a peer of its own: users may have either. For bfloat16, the peer's
    fastest program in any precision is used: bfloat16 may be slower there.
    """
    for name in [name for name in programs if name in OWN]:
        for peer in PEERS:
            of_peer = [other for other in programs if other.startswith(peer)]
            if "bfloat16" not in name:
                of_peer = [other for other in of_peer if "bfloat16" not in other]
            with_variable = [other for other in of_peer if "oneDNN" in other]
            for each in ([n for n in of_peer if n not in with_variable], with_variable):
                if each:
                    yield name, min(each, key=lambda n: np.median(programs[n]["secs"]))
